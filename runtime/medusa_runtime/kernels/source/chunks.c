/* Sends and receives chunks between a socket and a region (region/layout.py), each after its frame (storage/framing.py).
 *
 * In Python, each chunk's share of the interpreter would take longer than its bytes, and the threads of a fetch would wait for
 * the interpreter's lock. The functions return when everything is done, or when the caller has to decide something. When they
 * are called again, they go on where they stopped. */
#define _GNU_SOURCE
#include <errno.h>
#include <limits.h>
#include <linux/futex.h>
#include <poll.h>
#include <stdatomic.h>
#include <stdint.h>
#include <sys/mman.h>
#include <sys/sendfile.h>
#include <sys/socket.h>
#include <sys/syscall.h>
#include <sys/uio.h>
#include <time.h>
#include <unistd.h>

#ifndef MADV_POPULATE_WRITE
#define MADV_POPULATE_WRITE 23 /* Linux 5.14 */
#endif

/* LOOK_MS: how often a wait checks whether it was stopped. WAKE_BYTES: the kernel's receive buffer grows to twice this size. */
enum { LOOK_MS = 100, WAKE_BYTES = 512 << 10 };

/* The return value of a function, or else a negative errno. */
enum status { DONE, TIMED_OUT, CLOSED, CORRUPT, STOPPED };

/* The frame that storage/framing.py packs: little-endian, like the machines for which this library is built. */
struct frame {
    uint32_t size, padding;
    uint64_t checksum;
};

/* Neighbouring chunks of one shard. All but the last have `bytes`. */
struct chunks {
    long count, bytes, last_bytes;
    _Atomic uint8_t *table;
    uint64_t *checksums;
    _Atomic uint64_t *fetched, *first_ns; /* words of the region's header; waits for chunks sleep on `fetched` */
};

struct receive_job {
    struct chunks chunks;
    uint8_t *data;
    uint64_t (*checksum)(const void *, size_t);
    long stop; /* return when this many chunks are complete */
    long done, filled; /* complete chunks, and bytes of the next one with its frame */
    int connection, silence_ms, wake_bytes, populate;
    struct frame frame;
};

struct send_job {
    struct chunks chunks;
    long offset; /* of the first chunk in `file` */
    long done, filled;
    int connection, file, idle_ms, patience_ms;
    _Atomic int stopped;
    struct frame frame;
};

static long size_of(const struct chunks *chunks, long number)
{
    return number + 1 < chunks->count ? chunks->bytes : chunks->last_bytes;
}

static int64_t now_ns(void)
{
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return now.tv_sec * 1000000000LL + now.tv_nsec;
}

static int least(int64_t one, int64_t other)
{
    return (int)(one < other ? one : other);
}

/* Raised with every change of the structures and functions. storage/compiled_chunks.py is their other side. */
int medusa_chunks_interface(void)
{
    return 1;
}

/* Publish a chunk whose bytes are complete. Several threads may do so for one chunk; only the first one counts. */
void medusa_publish_chunk(struct chunks *chunks, long number, uint64_t checksum)
{
    if (atomic_load(&chunks->table[number]))
        return;
    chunks->checksums[number] = checksum;
    if (atomic_exchange(&chunks->table[number], 1))
        return;
    uint64_t none = 0;
    atomic_compare_exchange_strong(chunks->first_ns, &none, (uint64_t)now_ns());
    atomic_fetch_add(chunks->fetched, (uint64_t)size_of(chunks, number));
    syscall(SYS_futex, chunks->fetched, FUTEX_WAKE, INT_MAX, NULL, NULL, 0);
}

/* Have the kernel wake us when this many bytes have arrived, not for each segment. */
static void wake_at(struct receive_job *r, long bytes)
{
    int wanted = least(bytes, WAKE_BYTES);
    if (wanted != r->wake_bytes) {
        setsockopt(r->connection, SOL_SOCKET, SO_RCVLOWAT, &wanted, sizeof wanted); /* sandboxes may not know it */
        r->wake_bytes = wanted;
    }
}

static int receive_one(struct receive_job *r, uint8_t *data, long size)
{
    const long head = sizeof r->frame;
    int64_t until = now_ns() + r->silence_ms * 1000000LL;
    while (r->filled < head + size) {
        struct iovec parts[2];
        int count = 0;
        long in_data = r->filled > head ? r->filled - head : 0;
        if (r->filled < head)
            parts[count++] = (struct iovec){(uint8_t *)&r->frame + r->filled, (size_t)(head - r->filled)};
        parts[count++] = (struct iovec){data + in_data, (size_t)(size - in_data)};
        wake_at(r, head + size - r->filled);
        struct pollfd readable = {.fd = r->connection, .events = POLLIN};
        int64_t left_ms = (until - now_ns() + 999999) / 1000000;
        poll(&readable, 1, left_ms > 0 ? (int)left_ms : 0);
        struct msghdr message = {.msg_iov = parts, .msg_iovlen = (size_t)count};
        ssize_t found = recvmsg(r->connection, &message, MSG_DONTWAIT);
        if (!found)
            return CLOSED;
        if (found < 0 && errno != EAGAIN && errno != EINTR)
            return -errno;
        if (found >= 0) {
            r->filled += found;
            until = now_ns() + r->silence_ms * 1000000LL;
        } else if (now_ns() >= until) /* else a signal ended the wait */
            return TIMED_OUT;
    }
    return DONE;
}

/* Receive chunks into a region, and publish each one whose checksum is right. */
int medusa_receive_chunks(struct receive_job *r)
{
    uint8_t *data = r->data + r->done * r->chunks.bytes;
    const uintptr_t page_bytes = (uintptr_t)sysconf(_SC_PAGESIZE);
    while (r->done < r->stop) {
        long size = size_of(&r->chunks, r->done);
        if (r->populate && !r->filled) {
            uint8_t *page = data - (uintptr_t)data % page_bytes;
            madvise(page, (size_t)(data + size - page), MADV_POPULATE_WRITE); /* if it fails, the pages fault one by one */
        }
        int status = receive_one(r, data, size);
        if (status != DONE)
            return status;
        if (r->frame.size != size || r->checksum(data, (size_t)size) != r->frame.checksum)
            return CORRUPT;
        medusa_publish_chunk(&r->chunks, r->done, r->frame.checksum);
        r->done++;
        r->filled = 0;
        data += size;
    }
    return DONE;
}

/* Sleep until a chunk is there. Returns TIMED_OUT when it has not come within `idle_ms`. */
static int await_chunk(struct send_job *s)
{
    int64_t until = now_ns() + s->idle_ms * 1000000LL;
    for (;;) {
        uint64_t seen = atomic_load(s->chunks.fetched); /* read first, so that a chunk published after it ends the wait */
        if (atomic_load(&s->chunks.table[s->done]))
            return DONE;
        if (s->stopped)
            return STOPPED;
        int64_t left = until - now_ns();
        if (left <= 0)
            return TIMED_OUT;
        left = left < LOOK_MS * 1000000LL ? left : LOOK_MS * 1000000LL;
        struct timespec limit = {0, left};
        syscall(SYS_futex, s->chunks.fetched, FUTEX_WAIT, (uint32_t)seen, &limit, NULL, 0);
    }
}

static int send_one(struct send_job *s, long offset, long size)
{
    const long head = sizeof s->frame;
    int64_t until = now_ns() + s->patience_ms * 1000000LL;
    while (s->filled < head + size) {
        ssize_t sent;
        if (s->filled < head) { /* MSG_MORE sends it together with the bytes, so that the reader wakes once */
            const uint8_t *frame = (const uint8_t *)&s->frame;
            sent = send(s->connection, frame + s->filled, (size_t)(head - s->filled), MSG_MORE | MSG_DONTWAIT | MSG_NOSIGNAL);
        } else {
            off_t at = offset + s->filled - head;
            sent = sendfile(s->connection, s->file, &at, (size_t)(head + size - s->filled));
            if (!sent)
                return CLOSED;
        }
        if (sent >= 0) {
            s->filled += sent;
            continue;
        }
        if (errno != EAGAIN && errno != EINTR)
            return -errno;
        int64_t left_ms = (until - now_ns()) / 1000000;
        if (left_ms <= 0)
            return -ETIMEDOUT;
        struct pollfd writable = {.fd = s->connection, .events = POLLOUT};
        poll(&writable, 1, least(left_ms, LOOK_MS));
        if (s->stopped)
            return STOPPED;
    }
    return DONE;
}

/* Send chunks of a region, each as soon as it is there. The kernel sends the bytes; this process does not copy them. */
int medusa_send_chunks(struct send_job *s)
{
    long offset = s->offset + s->done * s->chunks.bytes;
    while (s->done < s->chunks.count) {
        long size = size_of(&s->chunks, s->done);
        if (s->stopped)
            return STOPPED;
        if (!s->filled) {
            int status = await_chunk(s);
            if (status != DONE)
                return status;
            s->frame = (struct frame){.size = (uint32_t)size, .checksum = s->chunks.checksums[s->done]};
        }
        int status = send_one(s, offset, size);
        if (status != DONE)
            return status;
        s->done++;
        s->filled = 0;
        offset += size;
    }
    return DONE;
}
