// Streams, events and captures.

#include "state.h"

#include <algorithm>

using namespace emulated;

namespace {

// What a graph of more than 100 kernels takes, if its kernels do not say.
const double GRAPH = 1e-6 * setting("EMULATED_GRAPH_US", 0);
unsigned long long captures = 0;

Event* of(cudaEvent_t event) { return reinterpret_cast<Event*>(event); }

}  // namespace

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
    if (!event->recorded) return cudaSuccess;
    if (event->stream->done < event->upto) {
        // By the clock late work may be over: now it is not, whatever comes of that answer.
        event->at = std::max(event->at, now());
        event->stream->free_at = std::max(event->stream->free_at, event->at);
        return fail(cudaErrorNotReady);
    }
    return now() >= event->at ? cudaSuccess : fail(cudaErrorNotReady);
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

// -- capture

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
