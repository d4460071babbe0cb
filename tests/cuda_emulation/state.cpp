#include "state.h"

#include <time.h>

#include <algorithm>
#include <cstdio>
#include <cstdlib>

namespace emulated {

double setting(const char* name, double otherwise) {
    const char* value = getenv(name);
    return value ? atof(value) : otherwise;
}

const bool LATE = setting("EMULATED_LATE", 0) > 0;
const bool STATS = setting("EMULATED_STATS", 0) > 0;
const double CALL = 1e-6 * setting("EMULATED_CALL_US", 0);
const double KERNEL = 1e-6 * setting("EMULATED_KERNEL_US", 2);

double now() {
    timespec at;
    clock_gettime(CLOCK_MONOTONIC, &at);
    return at.tv_sec + 1e-9 * at.tv_nsec;
}

void spin(double seconds) {
    if (seconds <= 0) return;
    for (double end = now() + seconds; now() < end;) __builtin_ia32_pause();
}

void sleep_until(double end) {
    for (double rest = end - now(); rest > 0; rest = end - now()) {
        timespec span{time_t(rest), long(1e9 * (rest - time_t(rest)))};
        nanosleep(&span, nullptr);
    }
}

void complain(const std::string& what) { fprintf(stderr, "emulated CUDA: %s\n", what.c_str()); }

std::recursive_mutex state;
// One thread at a time has effects happen.
std::recursive_mutex device;
Stream legacy;
std::set<Stream*> streams{&legacy};
std::map<std::string, long> counts;
thread_local cudaError_t last_error = cudaSuccess;
thread_local cudaStreamCaptureMode thread_mode = cudaStreamCaptureModeGlobal;

cudaError_t fail(cudaError_t error) { return last_error = error; }

Stream* of(cudaStream_t stream) {
    bool is_legacy = !stream || stream == cudaStreamLegacy || stream == cudaStreamPerThread;
    return is_legacy ? &legacy : reinterpret_cast<Stream*>(stream);
}

cudaError_t invalidate(Graph* graph, const std::string& what, cudaError_t error) {
    graph->invalid = true;
    complain(what);
    return fail(error);
}

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

cudaError_t enqueue(Stream* stream, const char* name, double seconds, Effect effect, bool late) {
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

namespace {
void tell() {
    for (auto& [name, number] : counts) fprintf(stderr, "%9ld %s\n", number, name.c_str());
}
const bool told = STATS && atexit(tell) == 0;
}  // namespace

}  // namespace emulated

using namespace emulated;

// -- for the other libraries, and for Python

API int emulated_launch(void* stream, const char* name, double seconds) {
    spin(CALL);
    return enqueue(of(static_cast<cudaStream_t>(stream)), name, seconds);
}

API double emulated_kernel_seconds() { return KERNEL; }

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
