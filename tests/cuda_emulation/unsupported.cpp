// What torch's libraries name of the runtime and nothing here uses. Apart, for it declares none of it right.

#include <cstdio>

#define UNSUPPORTED(name)                                              \
    extern "C" __attribute__((visibility("default"))) int name() {     \
        fprintf(stderr, "emulated CUDA: %s is not emulated\n", #name); \
        return 801;                                                    \
    }

UNSUPPORTED(cudaDeviceGetDefaultMemPool)
UNSUPPORTED(cudaDeviceGetGraphMemAttribute)
UNSUPPORTED(cudaDeviceSetGraphMemAttribute)
UNSUPPORTED(cudaFreeAsync)
UNSUPPORTED(cudaGraphAddNode)
UNSUPPORTED(cudaGraphConditionalHandleCreate)
UNSUPPORTED(cudaGraphInstantiate)
UNSUPPORTED(cudaGraphRetainUserObject)
UNSUPPORTED(cudaIpcCloseMemHandle)
UNSUPPORTED(cudaIpcGetEventHandle)
UNSUPPORTED(cudaIpcGetMemHandle)
UNSUPPORTED(cudaIpcOpenEventHandle)
UNSUPPORTED(cudaIpcOpenMemHandle)
UNSUPPORTED(cudaKernelSetAttributeForDevice)
UNSUPPORTED(cudaLaunchCooperativeKernel)
UNSUPPORTED(cudaLibraryGetGlobal)
UNSUPPORTED(cudaLibraryGetKernel)
UNSUPPORTED(cudaLibraryGetKernelCount)
UNSUPPORTED(cudaLibraryGetManaged)
UNSUPPORTED(cudaLibraryGetUnifiedFunction)
UNSUPPORTED(cudaLibraryLoadData)
UNSUPPORTED(cudaLibraryLoadFromFile)
UNSUPPORTED(cudaLibraryUnload)
UNSUPPORTED(cudaMallocAsync)
UNSUPPORTED(cudaMallocHost)
UNSUPPORTED(cudaMallocManaged)
UNSUPPORTED(cudaMemPoolGetAttribute)
UNSUPPORTED(cudaMemPoolSetAccess)
UNSUPPORTED(cudaMemPoolSetAttribute)
UNSUPPORTED(cudaMemPoolTrimTo)
UNSUPPORTED(cudaStreamAddCallback)
UNSUPPORTED(cudaStreamBeginCaptureToGraph)
UNSUPPORTED(cudaStreamUpdateCaptureDependencies)
UNSUPPORTED(cudaUserObjectCreate)
UNSUPPORTED(cudaUserObjectRelease)
