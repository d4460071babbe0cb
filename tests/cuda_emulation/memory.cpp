// Memory: of the device, page-locked and neither, all of it the host's; and copies.

#include "state.h"

#include <sys/mman.h>

#include <cstring>

using namespace emulated;

namespace {

const bool COMPUTE = setting("EMULATED_COMPUTE", 0) > 0;
const size_t TOTAL = size_t(setting("EMULATED_GIB", 139.8) * (1ull << 30));
// What a context takes for itself.
const size_t CONTEXT = 600ull << 20;
const size_t GUARD = 1 << 12;

enum Kind { PAGEABLE, DEVICE, PINNED };

struct Range {
    size_t size;
    Kind kind;
};

std::map<const char*, Range> memory;
size_t used = 0;

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

}  // namespace

API int emulated_kind(const void* at) { return kind_of(at); }
API size_t emulated_memory() { return TOTAL; }

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
