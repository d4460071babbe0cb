// A client of many streams that only counts: one thread, one epoll, nothing parsed.
//
//   client PORT PATH STREAMS MODULUS BEFORE AFTER
//
// Opens STREAMS connections with one request each, with the body BEFORE NUMBER AFTER, where the numbers are those of
// the requests modulo MODULUS. For a line on its standard input it prints one line of JSON; it ends with the input.

#include <arpa/inet.h>
#include <netinet/tcp.h>
#include <sys/epoll.h>
#include <sys/resource.h>
#include <unistd.h>

#include <cerrno>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <ctime>
#include <string>
#include <vector>

namespace {

constexpr int kOpening = 128;  // connections that wait for their first byte at a time

struct Connection {
    int fd = -1;
    uint32_t number = 0;
    bool newline = false;  // the last byte was one
    bool begun = false;    // this response has begun
    char tail[7] = {};
    std::string request;
};

struct Counts {
    uint64_t events = 0, bytes = 0, begun = 0, done = 0, errors = 0, sent = 0;
};

int port, loop, opening = 0, opened = 0;
uint64_t modulus;
std::string path, before, after;
Counts counts;
std::vector<Connection> connections;

void arm(Connection &each, int operation, uint32_t events) {
    epoll_event wanted{};
    wanted.events = events;
    wanted.data.u32 = static_cast<uint32_t>(&each - connections.data());
    epoll_ctl(loop, operation, each.fd, &wanted);
}

void ask(Connection &each) {
    each.number = static_cast<uint32_t>(counts.sent++ % modulus);
    each.begun = each.newline = false;
    std::string body = before + std::to_string(each.number) + after;
    each.request = "POST " + path + " HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Type: application/json\r\n" +
                   "Content-Length: " + std::to_string(body.size()) + "\r\n\r\n" + body;
}

void open_more() {
    while (opening < kOpening && opened < static_cast<int>(connections.size())) {
        Connection &each = connections[opened++];
        each.fd = socket(AF_INET, SOCK_STREAM | SOCK_NONBLOCK, 0);
        sockaddr_in address{};
        address.sin_family = AF_INET;
        address.sin_port = htons(static_cast<uint16_t>(port));
        address.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
        int one = 1;
        setsockopt(each.fd, IPPROTO_TCP, TCP_NODELAY, &one, sizeof one);
        connect(each.fd, reinterpret_cast<sockaddr *>(&address), sizeof address);
        ask(each);
        ++opening;
        arm(each, EPOLL_CTL_ADD, EPOLLOUT);
    }
}

void leave(Connection &each, bool failed) {
    counts.errors += failed;
    if (failed && !each.begun) --opening;
    close(each.fd);
    each.fd = -1;
}

void send_request(Connection &each) {
    ssize_t sent = send(each.fd, each.request.data(), each.request.size(), MSG_NOSIGNAL);
    if (sent != static_cast<ssize_t>(each.request.size())) return leave(each, true);
    arm(each, EPOLL_CTL_MOD, EPOLLIN);
}

void count(Connection &each, const char *data, size_t size) {
    if (!each.begun) {
        each.begun = true;
        ++counts.begun;
        --opening;
        if (size < 12 || memcmp(data + 9, "200", 3) != 0) return leave(each, true);
    }
    counts.bytes += size;
    // An event ends with two newlines, and no other newlines are next to each other.
    const char *end = data + size, *at = data;
    if (each.newline && *data == '\n') ++counts.events;
    while ((at = static_cast<const char *>(memchr(at, '\n', static_cast<size_t>(end - at))))) {
        ++at;
        if (at == end) break;
        if (*at == '\n') ++counts.events, ++at;
        if (at == end) break;
    }
    each.newline = end[-1] == '\n' && (size < 2 || end[-2] != '\n');
    size_t tail = size < 7 ? size : 7;
    memmove(each.tail, each.tail + tail, 7 - tail);
    memcpy(each.tail + 7 - tail, end - tail, tail);
    if (memcmp(each.tail, "\r\n0\r\n\r\n", 7) == 0) {
        ++counts.done;
        leave(each, false);
    }
}

void report() {
    rusage used{};
    getrusage(RUSAGE_SELF, &used);
    double cpu = static_cast<double>(used.ru_utime.tv_sec + used.ru_stime.tv_sec) +
                 1e-6 * static_cast<double>(used.ru_utime.tv_usec + used.ru_stime.tv_usec);
    timespec now{};
    clock_gettime(CLOCK_MONOTONIC, &now);
    printf("{\"time\":%.6f,\"events\":%lu,\"bytes\":%lu,\"begun\":%lu,\"done\":%lu,\"errors\":%lu,\"cpu\":%.4f}\n",
           static_cast<double>(now.tv_sec) + 1e-9 * static_cast<double>(now.tv_nsec), counts.events,
           counts.bytes, counts.begun, counts.done, counts.errors, cpu);
    fflush(stdout);
}

}  // namespace

int main(int count_of, char **given) {
    if (count_of != 7) return 2;
    port = atoi(given[1]);
    path = given[2];
    connections.resize(static_cast<size_t>(atoi(given[3])));
    modulus = strtoull(given[4], nullptr, 10);
    before = given[5];
    after = given[6];
    loop = epoll_create1(0);
    epoll_event wanted{}, ready[256];
    wanted.events = EPOLLIN;
    wanted.data.u32 = UINT32_MAX;
    epoll_ctl(loop, EPOLL_CTL_ADD, STDIN_FILENO, &wanted);
    static char buffer[1 << 16];
    while (true) {
        open_more();
        int found = epoll_wait(loop, ready, 256, -1);
        for (int at = 0; at < found; ++at) {
            if (ready[at].data.u32 == UINT32_MAX) {
                ssize_t size = read(STDIN_FILENO, buffer, sizeof buffer);
                if (size <= 0) return 0;
                for (ssize_t each = 0; each < size; ++each)
                    if (buffer[each] == '\n') report();
                continue;
            }
            Connection &each = connections[ready[at].data.u32];
            if (each.fd < 0) continue;
            if (ready[at].events & EPOLLOUT) {
                send_request(each);
                continue;
            }
            ssize_t size = recv(each.fd, buffer, sizeof buffer, 0);
            if (size > 0)
                count(each, buffer, static_cast<size_t>(size));
            else if (size == 0 || (errno != EAGAIN && errno != EINTR))
                leave(each, true);
        }
    }
}
