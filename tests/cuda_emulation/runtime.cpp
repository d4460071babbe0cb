// The CUDA runtime: memory of the host, streams that keep order and time, events, and capture.
//
// A stream is a queue of work. What is put there has an end on a clock, which follows from how long all of it
// takes, and an effect, which happens when the order of the device says so: at once, or when somebody waits.
// Effects may call Python: they never happen while `state` is locked.

#include <cuda_runtime_api.h>

#include <dlfcn.h>
#include <pthread.h>
#include <sys/mman.h>
#include <time.h>

#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <deque>
#include <functional>
#include <map>
#include <mutex>
#include <set>
#include <string>
#include <unordered_map>
#include <utility>
#include <vector>

#define API extern "C" __attribute__((visibility("default")))

namespace {

double setting(const char* name, double otherwise) {
    const char* value = getenv(name);
    return value ? atof(value) : otherwise;
}

const bool LATE = setting("EMULATED_LATE", 0) > 0;
const bool COMPUTE = setting("EMULATED_COMPUTE", 0) > 0;
const bool STATS = setting("EMULATED_STATS", 0) > 0;
const double CALL = 1e-6 * setting("EMULATED_CALL_US", 0);
const double KERNEL = 1e-6 * setting("EMULATED_KERNEL_US", 2);
const double GRAPH = 1e-6 * setting("EMULATED_GRAPH_US", 0);
const size_t TOTAL = size_t(setting("EMULATED_GIB", 139.8) * (1ull << 30));
// What a context takes for itself.
const size_t CONTEXT = 600ull << 20;
const size_t GUARD = 1 << 12;

double now() {
    timespec at;
    clock_gettime(CLOCK_MONOTONIC, &at);
    return at.tv_sec + 1e-9 * at.tv_nsec;
}

// The host computes.
void spin(double seconds) {
    if (seconds <= 0) return;
    for (double end = now() + seconds; now() < end;) __builtin_ia32_pause();
}

// The host waits.
void sleep_until(double end) {
    for (double rest = end - now(); rest > 0; rest = end - now()) {
        timespec span{time_t(rest), long(1e9 * (rest - time_t(rest)))};
        nanosleep(&span, nullptr);
    }
}

void complain(const std::string& what) { fprintf(stderr, "emulated CUDA: %s\n", what.c_str()); }

using Effect = std::function<void()>;

struct Work {
    double seconds;
    Effect effect;
};

struct Graph {
    unsigned long long id;
    std::vector<Work> work;
    bool invalid = false;
};

struct Stream {
    // An effect, or the place in another stream that comes first.
    struct Pending {
        Effect effect;
        Stream* other = nullptr;
        long upto = 0;
    };
    unsigned flags = 0;
    int priority = 0;
    std::deque<Pending> pending;
    long pushed = 0, done = 0;
    double free_at = 0;
    Graph* capture = nullptr;
    // Whether the capture began here, and how.
    bool origin = false;
    cudaStreamCaptureMode mode{};
    pthread_t thread{};

    bool blocking() const { return !(flags & cudaStreamNonBlocking); }
};

struct Event {
    unsigned flags = 0;
    bool recorded = false;
    Stream* stream = nullptr;
    long upto = 0;
    double at = 0;
    Graph* capture = nullptr;
};

enum Kind { PAGEABLE, DEVICE, PINNED };

struct Range {
    size_t size;
    Kind kind;
};

std::recursive_mutex state, device;
using Lock = std::lock_guard<std::recursive_mutex>;
Stream legacy;
std::set<Stream*> streams{&legacy};
std::map<const char*, Range> memory;
size_t used = 0;
unsigned long long captures = 0;
std::unordered_map<const void*, std::string*> kernels;
std::map<std::string, long> counts;
thread_local cudaError_t last_error = cudaSuccess;
thread_local cudaStreamCaptureMode thread_mode = cudaStreamCaptureModeGlobal;

cudaError_t fail(cudaError_t error) { return last_error = error; }

Stream* of(cudaStream_t stream) {
    bool is_legacy = !stream || stream == cudaStreamLegacy || stream == cudaStreamPerThread;
    return is_legacy ? &legacy : reinterpret_cast<Stream*>(stream);
}

Event* of(cudaEvent_t event) { return reinterpret_cast<Event*>(event); }

void count(const char* what) {
    Lock lock(state);
    counts[what]++;
}

cudaError_t invalidate(Graph* graph, const std::string& what, cudaError_t error) {
    graph->invalid = true;
    complain(what);
    return fail(error);
}

// Whether a capture under way forbids this thread calls that might synchronize. Locked.
bool forbidden(const char* what) {
    if (thread_mode == cudaStreamCaptureModeRelaxed) return false;
    for (Stream* stream : streams) {
        if (!stream->capture || !stream->origin) continue;
        bool here = pthread_equal(stream->thread, pthread_self());
        bool counts_here = stream->mode == cudaStreamCaptureModeGlobal ||
                           (stream->mode == cudaStreamCaptureModeThreadLocal && here);
        if (!counts_here) continue;
        invalidate(stream->capture, std::string(what) + " during a capture", cudaErrorStreamCaptureUnsupported);
        return true;
    }
    return false;
}

// Have everything up to a place of a stream happen, and what that waits for. Not locked.
void flush(Stream* stream, long upto) {
    Lock one_at_a_time(device);
    for (;;) {
        Stream::Pending next;
        {
            Lock lock(state);
            if (stream->done >= upto || stream->pending.empty()) return;
            next = std::move(stream->pending.front());
            stream->pending.pop_front();
            stream->done++;
        }
        if (next.other) flush(next.other, next.upto);
        if (next.effect) next.effect();
    }
}

void flush_all() {
    std::vector<std::pair<Stream*, long>> all;
    {
        Lock lock(state);
        for (Stream* stream : streams) all.emplace_back(stream, stream->pushed);
    }
    for (auto& [stream, upto] : all) flush(stream, upto);
}

void wait_for(Stream* stream, Stream* other, long upto, double at) {
    stream->pending.push_back({nullptr, other, upto});
    stream->pushed++;
    stream->free_at = std::max(stream->free_at, at);
}

cudaError_t enqueue(Stream* stream, const char* name, double seconds, Effect effect = nullptr, bool late = false) {
    long upto;
    {
        Lock lock(state);
        counts[name]++;
        if (stream->capture) {
            stream->capture->work.push_back({seconds, std::move(effect)});
            return cudaSuccess;
        }
        // The legacy stream and the blocking ones wait for each other.
        for (Stream* other : streams) {
            if (other == stream || !other->blocking()) continue;
            if (stream == &legacy && other->capture)
                return invalidate(other->capture, std::string("the legacy stream is used during a capture: ") + name,
                                  cudaErrorStreamCaptureImplicit);
            if (stream == &legacy || (other == &legacy && stream->blocking()))
                wait_for(stream, other, other->pushed, other->free_at);
        }
        stream->free_at = std::max(stream->free_at, now()) + seconds;
        stream->pending.push_back({std::move(effect)});
        upto = ++stream->pushed;
    }
    if (!LATE && !late) flush(stream, upto);
    return cudaSuccess;
}

void settle(Stream* stream) {
    long upto;
    double end;
    {
        Lock lock(state);
        upto = stream->pushed;
        end = stream->free_at;
    }
    flush(stream, upto);
    sleep_until(end);
}

Kind kind_of(const void* at) {
    Lock lock(state);
    auto next = memory.upper_bound(static_cast<const char*>(at));
    if (next == memory.begin()) return PAGEABLE;
    auto& [begin, range] = *std::prev(next);
    return static_cast<const char*>(at) < begin + range.size ? range.kind : PAGEABLE;
}

void* take(size_t size, Kind kind) {
    int flags = MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE;
    void* begin = mmap(nullptr, size + GUARD, PROT_READ | PROT_WRITE, flags, -1, 0);
    if (begin == MAP_FAILED) return nullptr;
    memory[static_cast<char*>(begin)] = {size, kind};
    return begin;
}

cudaError_t give(void* begin) {
    auto found = memory.find(static_cast<char*>(begin));
    if (found == memory.end()) return fail(cudaErrorInvalidValue);
    if (found->second.kind == DEVICE) used -= found->second.size;
    munmap(begin, found->second.size + GUARD);
    memory.erase(found);
    return cudaSuccess;
}

cudaError_t copy(void* to, const void* from, size_t size, Stream* stream, bool waits) {
    static const char* names[3][3] = {{"copy H2H", "copy D2H pageable", "copy H2H"},
                                      {"copy H2D pageable", "copy D2D", "copy H2D"},
                                      {"copy H2H", "copy D2H", "copy H2H"}};
    Kind there = kind_of(to), here = kind_of(from);
    bool to_host = here == DEVICE && there != DEVICE;
    {
        Lock lock(state);
        if (waits && forbidden("cudaMemcpy")) return fail(cudaErrorStreamCaptureUnsupported);
        if (stream->capture && (there == PAGEABLE || here == PAGEABLE)) complain("pageable memory in a capture");
    }
    spin(CALL);
    double seconds = here == DEVICE && there == DEVICE ? 2e-6 + 2.0 * size / 4e12 : 4e-6 + size / 50e9;
    bool nothing = to_host && there == PINNED && !COMPUTE;
    auto effect = [=] { nothing ? memset(to, 0, size) : memmove(to, from, size); };
    cudaError_t error = enqueue(stream, names[there][here], seconds, effect, to_host);
    waits = waits || there == PAGEABLE || here == PAGEABLE;
    if (error == cudaSuccess && waits && !stream->capture) settle(stream);
    return error;
}

void tell() {
    for (auto& [name, number] : counts) fprintf(stderr, "%9ld %s\n", number, name.c_str());
}
const bool told = STATS && atexit(tell) == 0;

}  // namespace

// -- for the other libraries, and for Python -------------------------------------------------------------

API int emulated_launch(void* stream, const char* name, double seconds) {
    spin(CALL);
    return enqueue(of(static_cast<cudaStream_t>(stream)), name, seconds);
}

API double emulated_kernel_seconds() { return KERNEL; }

API int emulated_kind(const void* at) { return kind_of(at); }

API int emulated_forbidden(const char* what) {
    Lock lock(state);
    return forbidden(what);
}

namespace {
void (*python)(long) = nullptr;
}

API void emulated_python(void (*function)(long)) { python = function; }

// Have Python called with a number when the stream comes to it, as often as a graph is replayed.
API int emulated_work(void* stream, long number, const char* name, int late) {
    return enqueue(of(static_cast<cudaStream_t>(stream)), name, KERNEL, [=] { python(number); }, late != 0);
}

// -- kernels -----------------------------------------------------------------------------------------------

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

// -- the device: an H200 -------------------------------------------------------------------------------------

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
    found->totalGlobalMem = TOTAL;
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

// -- memory ------------------------------------------------------------------------------------------------

API cudaError_t cudaMalloc(void** begin, size_t size) {
    Lock lock(state);
    counts["cudaMalloc"]++;
    *begin = nullptr;
    if (forbidden("cudaMalloc")) return fail(cudaErrorStreamCaptureUnsupported);
    if (used + size > TOTAL - CONTEXT) return fail(cudaErrorMemoryAllocation);
    if (!(*begin = take(size, DEVICE))) return fail(cudaErrorMemoryAllocation);
    used += size;
    return cudaSuccess;
}
API cudaError_t cudaFree(void* begin) {
    if (!begin) return cudaSuccess;
    flush_all();
    Lock lock(state);
    counts["cudaFree"]++;
    return forbidden("cudaFree") ? fail(cudaErrorStreamCaptureUnsupported) : give(begin);
}
API cudaError_t cudaHostAlloc(void** begin, size_t size, unsigned) {
    Lock lock(state);
    counts["cudaHostAlloc"]++;
    if (forbidden("cudaHostAlloc")) return fail(cudaErrorStreamCaptureUnsupported);
    return (*begin = take(size, PINNED)) ? cudaSuccess : fail(cudaErrorMemoryAllocation);
}
API cudaError_t cudaFreeHost(void* begin) {
    Lock lock(state);
    return begin ? give(begin) : cudaSuccess;
}
API cudaError_t cudaHostRegister(void* begin, size_t size, unsigned) {
    Lock lock(state);
    memory[static_cast<char*>(begin)] = {size, PINNED};
    return cudaSuccess;
}
API cudaError_t cudaHostUnregister(void* begin) {
    Lock lock(state);
    memory.erase(static_cast<char*>(begin));
    return cudaSuccess;
}
API cudaError_t cudaMemGetInfo(size_t* free, size_t* total) {
    Lock lock(state);
    *total = TOTAL;
    *free = TOTAL - CONTEXT - used;
    return cudaSuccess;
}
API cudaError_t cudaPointerGetAttributes(cudaPointerAttributes* found, const void* at) {
    static const cudaMemoryType types[] = {cudaMemoryTypeUnregistered, cudaMemoryTypeDevice, cudaMemoryTypeHost};
    Kind kind = kind_of(at);
    memset(found, 0, sizeof *found);
    found->type = types[kind];
    if (kind != PAGEABLE) found->devicePointer = const_cast<void*>(at);
    if (kind == PINNED) found->hostPointer = const_cast<void*>(at);
    return cudaSuccess;
}
API cudaError_t cudaMemcpy(void* to, const void* from, size_t size, cudaMemcpyKind) {
    return copy(to, from, size, &legacy, true);
}
API cudaError_t cudaMemcpyAsync(void* to, const void* from, size_t size, cudaMemcpyKind, cudaStream_t stream) {
    return copy(to, from, size, of(stream), false);
}
API cudaError_t cudaMemcpyPeerAsync(void* to, int, const void* from, int, size_t size, cudaStream_t stream) {
    return copy(to, from, size, of(stream), false);
}
API cudaError_t cudaMemcpy2DAsync(void* to, size_t to_pitch, const void* from, size_t from_pitch, size_t width,
                                  size_t height, cudaMemcpyKind, cudaStream_t stream) {
    spin(CALL);
    return enqueue(of(stream), "copy 2D", 4e-6, [=] {
        for (size_t row = 0; row < height; row++)
            memmove(static_cast<char*>(to) + row * to_pitch, static_cast<const char*>(from) + row * from_pitch, width);
    });
}
API cudaError_t cudaMemcpyToSymbol(const void*, const void*, size_t, size_t, cudaMemcpyKind) { return cudaSuccess; }
API cudaError_t cudaMemsetAsync(void* at, int value, size_t size, cudaStream_t stream) {
    spin(CALL);
    return enqueue(of(stream), "memset", 2e-6 + size / 4e12, [=] { memset(at, value, size); });
}
API cudaError_t cudaMemset(void* at, int value, size_t size) { return cudaMemsetAsync(at, value, size, nullptr); }

// -- streams and events ------------------------------------------------------------------------------------

API cudaError_t cudaStreamCreateWithPriority(cudaStream_t* made, unsigned flags, int priority) {
    Lock lock(state);
    auto* stream = new Stream;
    stream->flags = flags;
    stream->priority = priority;
    streams.insert(stream);
    *made = reinterpret_cast<cudaStream_t>(stream);
    return cudaSuccess;
}
API cudaError_t cudaStreamCreateWithFlags(cudaStream_t* made, unsigned flags) {
    return cudaStreamCreateWithPriority(made, flags, 0);
}
API cudaError_t cudaStreamCreate(cudaStream_t* made) { return cudaStreamCreateWithPriority(made, 0, 0); }
API cudaError_t cudaStreamDestroy(cudaStream_t) { return cudaSuccess; }
API cudaError_t cudaStreamGetPriority(cudaStream_t stream, int* priority) {
    *priority = of(stream)->priority;
    return cudaSuccess;
}
API cudaError_t cudaStreamQuery(cudaStream_t which) {
    Lock lock(state);
    Stream* stream = of(which);
    if (stream->capture)
        return invalidate(stream->capture, "a captured stream is asked", cudaErrorStreamCaptureUnsupported);
    bool over = stream->pending.empty() && now() >= stream->free_at;
    return over ? cudaSuccess : cudaErrorNotReady;
}
API cudaError_t cudaStreamSynchronize(cudaStream_t which) {
    Stream* stream = of(which);
    {
        Lock lock(state);
        counts["cudaStreamSynchronize"]++;
        if (stream->capture)
            return invalidate(stream->capture, "a captured stream is waited for", cudaErrorStreamCaptureUnsupported);
        if (forbidden("cudaStreamSynchronize")) return fail(cudaErrorStreamCaptureUnsupported);
    }
    settle(stream);
    return cudaSuccess;
}
API cudaError_t cudaStreamWaitEvent(cudaStream_t which, cudaEvent_t awaited, unsigned) {
    Lock lock(state);
    counts["cudaStreamWaitEvent"]++;
    Stream* stream = of(which);
    Event* event = of(awaited);
    if (event->capture) {
        if (stream->capture && stream->capture != event->capture)
            return invalidate(stream->capture, "two captures meet", cudaErrorStreamCaptureMerge);
        stream->capture = event->capture;
    } else if (stream->capture) {
        return invalidate(stream->capture, "a capture waits for something outside", cudaErrorStreamCaptureIsolation);
    } else if (event->recorded && event->stream != stream) {
        wait_for(stream, event->stream, event->upto, event->at);
    }
    return cudaSuccess;
}
API cudaError_t cudaEventCreateWithFlags(cudaEvent_t* made, unsigned flags) {
    auto* event = new Event;
    event->flags = flags;
    *made = reinterpret_cast<cudaEvent_t>(event);
    return cudaSuccess;
}
API cudaError_t cudaEventCreate(cudaEvent_t* made) { return cudaEventCreateWithFlags(made, 0); }
API cudaError_t cudaEventDestroy(cudaEvent_t) { return cudaSuccess; }
API cudaError_t cudaEventRecordWithFlags(cudaEvent_t recorded, cudaStream_t which, unsigned) {
    Lock lock(state);
    counts["cudaEventRecord"]++;
    Stream* stream = of(which);
    Event* event = of(recorded);
    event->recorded = true;
    event->stream = stream;
    event->upto = stream->pushed;
    event->capture = stream->capture;
    event->at = std::max(stream->free_at, now());
    return cudaSuccess;
}
API cudaError_t cudaEventRecord(cudaEvent_t event, cudaStream_t stream) {
    return cudaEventRecordWithFlags(event, stream, 0);
}
API cudaError_t cudaEventQuery(cudaEvent_t asked) {
    Lock lock(state);
    counts["cudaEventQuery"]++;
    Event* event = of(asked);
    if (event->capture) return invalidate(event->capture, "a captured event is asked", cudaErrorCapturedEvent);
    if (forbidden("cudaEventQuery")) return fail(cudaErrorStreamCaptureUnsupported);
    bool over = !event->recorded || (event->stream->done >= event->upto && now() >= event->at);
    return over ? cudaSuccess : fail(cudaErrorNotReady);
}
API cudaError_t cudaEventSynchronize(cudaEvent_t awaited) {
    Event event;
    {
        Lock lock(state);
        counts["cudaEventSynchronize"]++;
        event = *of(awaited);
        if (event.capture) return invalidate(event.capture, "a captured event is waited for", cudaErrorCapturedEvent);
    }
    if (!event.recorded) return cudaSuccess;
    flush(event.stream, event.upto);
    sleep_until(event.at);
    return cudaSuccess;
}
API cudaError_t cudaEventElapsedTime(float* milliseconds, cudaEvent_t begin, cudaEvent_t end) {
    Lock lock(state);
    Event *first = of(begin), *second = of(end);
    if ((first->flags | second->flags) & cudaEventDisableTiming || !first->recorded || !second->recorded)
        return fail(cudaErrorInvalidResourceHandle);
    if (now() < std::max(first->at, second->at)) return fail(cudaErrorNotReady);
    *milliseconds = float(1e3 * (second->at - first->at));
    return cudaSuccess;
}
API cudaError_t cudaLaunchHostFunc(cudaStream_t stream, cudaHostFn_t function, void* data) {
    return enqueue(of(stream), "cudaLaunchHostFunc", 1e-6, [=] { function(data); });
}

// -- capture -----------------------------------------------------------------------------------------------

API cudaError_t cudaStreamBeginCapture(cudaStream_t which, cudaStreamCaptureMode mode) {
    Lock lock(state);
    Stream* stream = of(which);
    if (stream == &legacy || stream->capture) return fail(cudaErrorStreamCaptureUnsupported);
    stream->capture = new Graph{++captures};
    stream->origin = true;
    stream->mode = mode;
    stream->thread = pthread_self();
    return cudaSuccess;
}
API cudaError_t cudaStreamEndCapture(cudaStream_t which, cudaGraph_t* made) {
    Lock lock(state);
    Graph* graph = of(which)->capture;
    *made = nullptr;
    if (!graph || !of(which)->origin) return fail(cudaErrorIllegalState);
    for (Stream* stream : streams)
        if (stream->capture == graph) stream->capture = nullptr;
    of(which)->origin = false;
    if (graph->invalid) return fail(cudaErrorStreamCaptureInvalidated);
    *made = reinterpret_cast<cudaGraph_t>(graph);
    return cudaSuccess;
}
API cudaError_t cudaStreamIsCapturing(cudaStream_t stream, cudaStreamCaptureStatus* status) {
    Lock lock(state);
    *status = of(stream)->capture ? cudaStreamCaptureStatusActive : cudaStreamCaptureStatusNone;
    return cudaSuccess;
}
API cudaError_t cudaStreamGetCaptureInfo(cudaStream_t stream, cudaStreamCaptureStatus* status, unsigned long long* id,
                                         cudaGraph_t* graph, const cudaGraphNode_t** nodes,
                                         const cudaGraphEdgeData** edges, size_t* number) {
    Lock lock(state);
    Graph* capture = of(stream)->capture;
    *status = capture ? cudaStreamCaptureStatusActive : cudaStreamCaptureStatusNone;
    if (id) *id = capture ? capture->id : 0;
    if (graph) *graph = reinterpret_cast<cudaGraph_t>(capture);
    if (nodes) *nodes = nullptr;
    if (edges) *edges = nullptr;
    if (number) *number = 0;
    return cudaSuccess;
}
API cudaError_t cudaThreadExchangeStreamCaptureMode(cudaStreamCaptureMode* mode) {
    std::swap(*mode, thread_mode);
    return cudaSuccess;
}
API cudaError_t cudaGraphInstantiateWithFlags(cudaGraphExec_t* made, cudaGraph_t graph, unsigned long long) {
    *made = reinterpret_cast<cudaGraphExec_t>(graph);
    return cudaSuccess;
}
API cudaError_t cudaGraphDestroy(cudaGraph_t) { return cudaSuccess; }
API cudaError_t cudaGraphExecDestroy(cudaGraphExec_t) { return cudaSuccess; }
API cudaError_t cudaGraphGetNodes(cudaGraph_t graph, cudaGraphNode_t*, size_t* number) {
    *number = reinterpret_cast<Graph*>(graph)->work.size();
    return cudaSuccess;
}
API cudaError_t cudaGraphNodeGetDependencies(cudaGraphNode_t, cudaGraphNode_t*, cudaGraphEdgeData*, size_t* number) {
    *number = 0;
    return cudaSuccess;
}
API cudaError_t cudaGraphDebugDotPrint(cudaGraph_t, const char*, unsigned) { return cudaSuccess; }
API cudaError_t cudaGraphLaunch(cudaGraphExec_t launched, cudaStream_t stream) {
    auto* graph = reinterpret_cast<Graph*>(launched);
    double seconds = 0;
    for (auto& work : graph->work) seconds += work.seconds;
    if (GRAPH > 0 && graph->work.size() > 100) seconds = GRAPH;
    spin(3 * CALL);
    return enqueue(of(stream), "graph", seconds, [=] {
        for (auto& work : graph->work)
            if (work.effect) work.effect();
    });
}

// -- what nothing here uses --------------------------------------------------------------------------------

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
