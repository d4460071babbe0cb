// Frames for many sockets in one call, which holds no lock of the interpreter.

#include <cerrno>
#include <cstdint>
#include <sys/socket.h>
#include <sys/types.h>

#ifndef MSG_NOSIGNAL  // macOS, where asyncio's sockets raise no SIGPIPE in Python: the signal is ignored there
#define MSG_NOSIGNAL 0
#endif

/// Send each of `count` frames, which lie one behind the other in `bytes`, to its socket. Waits for none.
/// `sent`: how many bytes each socket has taken; 0 where it failed, which its transport finds out.
extern "C" void send_frames(
    const int *sockets, const char *bytes, const int64_t *lengths, int64_t count, int64_t *sent) {
    for (int64_t at = 0; at < count; ++at) {
        const ssize_t taken =
            send(sockets[at], bytes, static_cast<size_t>(lengths[at]), MSG_DONTWAIT | MSG_NOSIGNAL);
        sent[at] = taken > 0 ? taken : 0;
        bytes += lengths[at];
    }
}
