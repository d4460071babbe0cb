// What the runtime keeps: streams of work, memory, captures; and the clock.
//
// A stream is a queue of work. What is put there has an end on a clock, which follows from how long all of it
// takes, and an effect, which happens when the order of the device says so: at once, or when somebody waits.
// Effects may call Python: they never happen while the state is locked.

#pragma once

#include <cuda_runtime_api.h>
#include <pthread.h>

#include <deque>
#include <functional>
#include <map>
#include <mutex>
#include <set>
#include <string>
#include <vector>

#define API extern "C" __attribute__((visibility("default")))

namespace emulated {

double setting(const char* name, double otherwise);

// What a launch costs the host, and a kernel the device, in seconds.
extern const double CALL, KERNEL;

double now();
// The host computes.
void spin(double seconds);
// The host waits.
void sleep_until(double end);
void complain(const std::string& what);

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

// Of everything below; never held by whoever has effects happen.
extern std::recursive_mutex state;
using Lock = std::lock_guard<std::recursive_mutex>;
extern Stream legacy;
extern std::set<Stream*> streams;
extern std::map<std::string, long> counts;
extern thread_local cudaError_t last_error;
extern thread_local cudaStreamCaptureMode thread_mode;

Stream* of(cudaStream_t stream);
cudaError_t fail(cudaError_t error);
// A capture comes to nothing.
cudaError_t invalidate(Graph* graph, const std::string& what, cudaError_t error);
// Whether a capture under way forbids this thread calls that might synchronize. Locked.
bool forbidden(const char* what);

cudaError_t enqueue(Stream* stream, const char* name, double seconds, Effect effect = nullptr, bool late = false);
// A stream goes on when another has come to a place. Locked.
void wait_for(Stream* stream, Stream* other, long upto, double at);
// Have everything up to a place of a stream happen, and what that waits for. Not locked.
void flush(Stream* stream, long upto);
void flush_all();
// Wait for a stream. Not locked.
void settle(Stream* stream);

}  // namespace emulated
