// The device, an H200, and its kernels, which do nothing; and errors.

#include "state.h"

#include <dlfcn.h>

#include <algorithm>
#include <cstdio>
#include <cstring>
#include <unordered_map>
#include <utility>

using namespace emulated;

API int emulated_launch(void* stream, const char* name, double seconds);
API size_t emulated_memory();

namespace {
std::unordered_map<const void*, std::string*> kernels;
}

// -- kernels

API void** __cudaRegisterFatBinary(void*) {
    static void* handle;
    return &handle;
}
API void __cudaRegisterFatBinaryEnd(void**) {}
API void __cudaUnregisterFatBinary(void**) {}
API char __cudaInitModule(void**) { return 0; }
API void __cudaRegisterVar(void**, char*, char*, const char*, int, size_t, int, int) {}
API void __cudaRegisterManagedVar(void**, void**, char*, const char*, int, size_t, int, int) {}
API void __cudaRegisterFunction(void**, const char* host, char*, const char* name, int, void*, void*, void*, void*,
                                int*) {
    Lock lock(state);
    kernels[host] = new std::string(name);
}

namespace {
struct Configuration {
    dim3 grid, block;
    size_t shared;
    void* stream;
};
thread_local std::vector<Configuration> configurations;
}  // namespace

API unsigned __cudaPushCallConfiguration(dim3 grid, dim3 block, size_t shared, void* stream) {
    configurations.push_back({grid, block, shared, stream});
    return 0;
}
API cudaError_t __cudaPopCallConfiguration(dim3* grid, dim3* block, size_t* shared, void* stream) {
    auto& top = configurations.back();
    *grid = top.grid;
    *block = top.block;
    *shared = top.shared;
    *static_cast<void**>(stream) = top.stream;
    configurations.pop_back();
    return cudaSuccess;
}
API cudaError_t __cudaGetKernel(cudaKernel_t* kernel, const void* function) {
    Lock lock(state);
    auto& name = kernels[function];
    if (!name) name = new std::string("a kernel without a name");
    *kernel = reinterpret_cast<cudaKernel_t>(name);
    return cudaSuccess;
}
API cudaError_t __cudaLaunchKernel(cudaKernel_t kernel, dim3, dim3, void**, size_t, cudaStream_t stream) {
    auto* name = reinterpret_cast<std::string*>(kernel);
    return cudaError_t(emulated_launch(stream, name->c_str(), KERNEL));
}
API cudaError_t cudaLaunchKernel(const void* function, dim3, dim3, void**, size_t, cudaStream_t stream) {
    cudaKernel_t kernel;
    __cudaGetKernel(&kernel, function);
    return __cudaLaunchKernel(kernel, {}, {}, nullptr, 0, stream);
}
API cudaError_t cudaLaunchKernelExC(const cudaLaunchConfig_t* config, const void* function, void**) {
    return cudaLaunchKernel(function, {}, {}, nullptr, 0, config->stream);
}
API cudaError_t cudaGetSymbolAddress(void** at, const void*) {
    static char room[1 << 20];
    *at = room;
    return cudaSuccess;
}
API cudaError_t cudaFuncGetAttributes(cudaFuncAttributes* found, const void*) {
    memset(found, 0, sizeof *found);
    found->binaryVersion = found->ptxVersion = 90;
    found->maxThreadsPerBlock = 1024;
    found->numRegs = 32;
    return cudaSuccess;
}
API cudaError_t cudaFuncSetAttribute(const void*, cudaFuncAttribute, int) { return cudaSuccess; }
API cudaError_t cudaOccupancyMaxActiveBlocksPerMultiprocessorWithFlags(int* blocks, const void*, int, size_t,
                                                                       unsigned) {
    *blocks = 2;
    return cudaSuccess;
}
API cudaError_t cudaOccupancyMaxActiveBlocksPerMultiprocessor(int* blocks, const void*, int, size_t) {
    *blocks = 2;
    return cudaSuccess;
}

// -- properties

API cudaError_t cudaGetDeviceCount(int* devices) {
    *devices = 1;
    return cudaSuccess;
}
API cudaError_t cudaGetDevice(int* number) {
    *number = 0;
    return cudaSuccess;
}
API cudaError_t cudaSetDevice(int) { return cudaSuccess; }
API cudaError_t cudaDriverGetVersion(int* version) {
    *version = 13000;
    return cudaSuccess;
}
API cudaError_t cudaRuntimeGetVersion(int* version) { return cudaDriverGetVersion(version); }
API cudaError_t cudaDeviceCanAccessPeer(int* can, int, int) {
    *can = 0;
    return cudaSuccess;
}
API cudaError_t cudaDeviceEnablePeerAccess(int, unsigned) { return cudaSuccess; }
API cudaError_t cudaDeviceGetPCIBusId(char* name, int size, int) {
    snprintf(name, size, "0000:00:00.0");
    return cudaSuccess;
}
API cudaError_t cudaDeviceGetStreamPriorityRange(int* least, int* greatest) {
    *least = 0;
    *greatest = -5;
    return cudaSuccess;
}
API cudaError_t cudaDeviceGetAttribute(int* value, cudaDeviceAttr attribute, int) {
    static const std::map<int, int> known{
        {cudaDevAttrMultiProcessorCount, 132},
        {cudaDevAttrComputeCapabilityMajor, 9},
        {cudaDevAttrMaxSharedMemoryPerBlock, 49152},
        {cudaDevAttrMaxSharedMemoryPerBlockOptin, 232448},
        {cudaDevAttrMaxSharedMemoryPerMultiprocessor, 233472},
        {cudaDevAttrMaxRegistersPerBlock, 65536},
        {cudaDevAttrMaxRegistersPerMultiprocessor, 65536},
        {cudaDevAttrWarpSize, 32},
        {cudaDevAttrMaxThreadsPerBlock, 1024},
        {cudaDevAttrMaxThreadsPerMultiProcessor, 2048},
        {cudaDevAttrMaxBlocksPerMultiprocessor, 32},
        {cudaDevAttrMaxGridDimX, 2147483647},
        {cudaDevAttrMaxGridDimY, 65535},
        {cudaDevAttrMaxGridDimZ, 65535},
        {cudaDevAttrMaxBlockDimX, 1024},
        {cudaDevAttrMaxBlockDimY, 1024},
        {cudaDevAttrMaxBlockDimZ, 64},
        {cudaDevAttrClockRate, 1980000},
        {cudaDevAttrMemoryClockRate, 3201000},
        {cudaDevAttrGlobalMemoryBusWidth, 6144},
        {cudaDevAttrL2CacheSize, 60 << 20},
    };
    auto found = known.find(attribute);
    *value = found == known.end() ? 0 : found->second;
    return cudaSuccess;
}
API cudaError_t cudaGetDeviceProperties(cudaDeviceProp* found, int) {
    memset(found, 0, sizeof *found);
    strcpy(found->name, "emulated");
    found->totalGlobalMem = emulated_memory();
    found->major = 9;
    found->multiProcessorCount = 132;
    found->warpSize = 32;
    found->maxThreadsPerBlock = found->maxThreadsDim[0] = found->maxThreadsDim[1] = 1024;
    found->maxThreadsDim[2] = 64;
    found->maxThreadsPerMultiProcessor = 2048;
    found->maxBlocksPerMultiProcessor = 32;
    found->maxGridSize[0] = 2147483647;
    found->maxGridSize[1] = found->maxGridSize[2] = 65535;
    found->sharedMemPerBlock = 49152;
    found->sharedMemPerBlockOptin = 232448;
    found->sharedMemPerMultiprocessor = 233472;
    found->regsPerBlock = found->regsPerMultiprocessor = 65536;
    found->l2CacheSize = 60 << 20;
    found->memoryBusWidth = 6144;
    found->textureAlignment = 512;
    found->concurrentKernels = found->unifiedAddressing = 1;
    found->asyncEngineCount = 3;
    return cudaSuccess;
}
API cudaError_t cudaDeviceSynchronize() {
    double end = 0;
    {
        Lock lock(state);
        counts["cudaDeviceSynchronize"]++;
        if (forbidden("cudaDeviceSynchronize")) return fail(cudaErrorStreamCaptureUnsupported);
        for (Stream* stream : streams) {
            end = std::max(end, stream->free_at);
            if (stream->capture)
                return invalidate(stream->capture, "cudaDeviceSynchronize while a stream is captured",
                                  cudaErrorStreamCaptureUnsupported);
        }
    }
    flush_all();
    sleep_until(end);
    return cudaSuccess;
}
API cudaError_t cudaProfilerStart() { return cudaSuccess; }
API cudaError_t cudaProfilerStop() { return cudaSuccess; }

API cudaError_t cudaGetLastError() { return std::exchange(last_error, cudaSuccess); }
API cudaError_t cudaPeekAtLastError() { return last_error; }
API const char* cudaGetErrorName(cudaError_t) { return "an emulated error"; }
API const char* cudaGetErrorString(cudaError_t error) {
    switch (error) {
        case cudaSuccess: return "no error";
        case cudaErrorMemoryAllocation: return "out of memory";
        case cudaErrorNotReady: return "device not ready";
        case cudaErrorStreamCaptureUnsupported: return "operation not permitted when stream is capturing";
        case cudaErrorStreamCaptureInvalidated: return "operation failed due to a previous error during capture";
        case cudaErrorStreamCaptureImplicit: return "the legacy stream would depend on a capturing blocking stream";
        default: return "an emulated error";
    }
}

// -- the driver

namespace {
int unsupported() { return cudaErrorNotSupported; }
}  // namespace

API cudaError_t cudaGetDriverEntryPointByVersion(const char* symbol, void** function, unsigned, unsigned long long,
                                                 cudaDriverEntryPointQueryResult* status) {
    static void* driver = dlopen("libcuda.so.1", RTLD_LAZY);
    *function = driver ? dlsym(driver, symbol) : nullptr;
    if (!*function) *function = reinterpret_cast<void*>(unsupported);
    if (status) *status = cudaDriverEntryPointSuccess;
    return cudaSuccess;
}
