// What torch's libraries name of the runtime and nothing here uses. Apart, for it declares none of it right.

#include <cstdio>

#define UNSUPPORTED(name)                                              \
    extern "C" __attribute__((visibility("default"))) int name() {     \
        fprintf(stderr, "emulated CUDA: %s is not emulated\n", #name); \
        return 801;                                                    \
    }

UNSUPPORTED(cudaLaunchCooperativeKernel)
UNSUPPORTED(cudaDeviceGetDefaultMemPool)
UNSUPPORTED(cudaFreeAsync)
UNSUPPORTED(cudaIpcCloseMemHandle)
UNSUPPORTED(cudaIpcGetEventHandle)
UNSUPPORTED(cudaIpcGetMemHandle)
UNSUPPORTED(cudaIpcOpenEventHandle)
UNSUPPORTED(cudaIpcOpenMemHandle)
UNSUPPORTED(cudaMallocAsync)
UNSUPPORTED(cudaMemPoolGetAttribute)
UNSUPPORTED(cudaMemPoolSetAccess)
UNSUPPORTED(cudaMemPoolSetAttribute)
UNSUPPORTED(cudaMemPoolTrimTo)
UNSUPPORTED(cudaStreamAddCallback)
