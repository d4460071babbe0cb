// The CUDA driver, as far as Triton and torch ask it.

#include <cuda.h>

#include <cstdio>
#include <string>

#define API extern "C" __attribute__((visibility("default")))

extern "C" int emulated_launch(void* stream, const char* name, double seconds);
extern "C" double emulated_kernel_seconds();
extern "C" int emulated_kind(const void* at);
extern "C" int cudaDeviceGetAttribute(int* value, int attribute, int device);

namespace {
thread_local CUcontext context = reinterpret_cast<CUcontext>(0x10);
const CUmodule module = reinterpret_cast<CUmodule>(0x20);
}  // namespace

API CUresult cuInit(unsigned) { return CUDA_SUCCESS; }
API CUresult cuDriverGetVersion(int* version) {
    *version = 13000;
    return CUDA_SUCCESS;
}
API CUresult cuDeviceGet(CUdevice* device, int) {
    *device = 0;
    return CUDA_SUCCESS;
}
API CUresult cuDeviceGetCount(int* devices) {
    *devices = 1;
    return CUDA_SUCCESS;
}
API CUresult cuDeviceGetAttribute(int* value, CUdevice_attribute attribute, CUdevice) {
    return CUresult(cudaDeviceGetAttribute(value, int(attribute), 0));
}
API CUresult cuDevicePrimaryCtxRetain(CUcontext* found, CUdevice) {
    *found = context;
    return CUDA_SUCCESS;
}
API CUresult cuDevicePrimaryCtxGetState(CUdevice, unsigned* flags, int* active) {
    *flags = 0;
    *active = 1;
    return CUDA_SUCCESS;
}
API CUresult cuCtxGetCurrent(CUcontext* found) {
    *found = context;
    return CUDA_SUCCESS;
}
API CUresult cuCtxSetCurrent(CUcontext set) {
    context = set;
    return CUDA_SUCCESS;
}
API CUresult cuCtxGetLimit(size_t* value, CUlimit) {
    *value = 0;
    return CUDA_SUCCESS;
}
API CUresult cuCtxSetLimit(CUlimit, size_t) { return CUDA_SUCCESS; }
API CUresult cuGetErrorString(CUresult, const char** words) {
    *words = "an emulated error";
    return CUDA_SUCCESS;
}
API CUresult cuGetErrorName(CUresult error, const char** words) { return cuGetErrorString(error, words); }

API CUresult cuModuleLoadData(CUmodule* loaded, const void*) {
    *loaded = module;
    return CUDA_SUCCESS;
}
API CUresult cuModuleUnload(CUmodule) { return CUDA_SUCCESS; }
API CUresult cuModuleGetFunction(CUfunction* function, CUmodule, const char* name) {
    *function = reinterpret_cast<CUfunction>(new std::string(name));
    return CUDA_SUCCESS;
}
API CUresult cuFuncGetAttribute(int* value, CUfunction_attribute attribute, CUfunction) {
    *value = attribute == CU_FUNC_ATTRIBUTE_MAX_THREADS_PER_BLOCK ? 1024 : 0;
    return CUDA_SUCCESS;
}
API CUresult cuFuncSetAttribute(CUfunction, CUfunction_attribute, int) { return CUDA_SUCCESS; }
API CUresult cuFuncSetCacheConfig(CUfunction, CUfunc_cache) { return CUDA_SUCCESS; }
API CUresult cuOccupancyMaxActiveClusters(int* clusters, CUfunction, const CUlaunchConfig*) {
    *clusters = 66;
    return CUDA_SUCCESS;
}

API CUresult cuLaunchKernelEx(const CUlaunchConfig* config, CUfunction function, void**, void**) {
    auto* name = reinterpret_cast<std::string*>(function);
    if (config->gridDimY > 65535 || config->gridDimZ > 65535 || config->sharedMemBytes > 232448) {
        fprintf(stderr, "emulated CUDA: %s does not fit the device\n", name->c_str());
        return CUDA_ERROR_INVALID_VALUE;
    }
    return CUresult(emulated_launch(config->hStream, name->c_str(), emulated_kernel_seconds()));
}

API CUresult cuPointerGetAttribute(void* value, CUpointer_attribute attribute, CUdeviceptr at) {
    if (!emulated_kind(reinterpret_cast<void*>(at)) || attribute != CU_POINTER_ATTRIBUTE_DEVICE_POINTER)
        return CUDA_ERROR_INVALID_VALUE;
    *static_cast<CUdeviceptr*>(value) = at;
    return CUDA_SUCCESS;
}
