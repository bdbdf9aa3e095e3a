/* The wide-area network between hosts: what bench/link.py promises, carried out packet by packet.
 *
 *     host --up--> queue, bits per second --latency--> queue, bits per second --down--> host
 *
 * A host is the descriptor of a TUN device. A packet passes two lines, its sender's up and its receiver's down; it is
 * given to the receiver when both have sent it. All times are those at which packets are due, not those at which this
 * loop got to them, so being woken late delays a packet but does not slow a line down.
 *
 * Devices hand over TCP segments as their host's kernel cuts them for a network card that cuts them further: one
 * packet here may be several on the wire, at most what a host sends in about a millisecond. Lines are charged for what
 * would be on the wire; a queue takes or drops such a packet as a whole.
 */
#define _GNU_SOURCE
#include <errno.h>
#include <linux/virtio_net.h>
#include <poll.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>
#include <unistd.h>

enum {
    READ_AT_ONCE = 64,     /* packets from one host before the next has its turn */
    LONGEST = 1 << 17,     /* bytes of a packet and its header, with room to spare */
    LATE_NS = 1000 * 1000, /* a delivery that comes this long after it was due is counted */
};

struct access {
    double ns_per_byte;
    int64_t latency_ns, queue_ns;
    int64_t framing; /* bytes on the wire beside each IP packet */
};

struct traffic {
    int64_t delivered, dropped, late; /* packets as they are on the wire */
};

struct packet {
    struct packet *next;
    int64_t due;
    int hearer, count; /* how many packets it is on the wire */
    int64_t on_wire;   /* bytes */
    size_t length;
    unsigned char bytes[];
};

struct queue {
    struct packet *first, *last;
};

struct host {
    struct queue flying, coming; /* to the far end; through this host's own line down. Both in order of time */
    int64_t up_free, down_free;  /* when each line has sent all that it was given */
};

static int64_t now(void) {
    struct timespec time;
    clock_gettime(CLOCK_MONOTONIC, &time);
    return time.tv_sec * INT64_C(1000000000) + time.tv_nsec;
}

static void append(struct queue *queue, struct packet *packet) {
    packet->next = NULL;
    if (queue->first)
        queue->last->next = packet;
    else
        queue->first = packet;
    queue->last = packet;
}

static struct packet *take(struct queue *queue) {
    struct packet *packet = queue->first;
    queue->first = packet->next;
    return packet;
}

/* When a line will have sent a packet that comes at `when`; -1 if it would wait too long for its turn. */
static int64_t sent(int64_t *free_at, int64_t when, const struct packet *packet, const struct access *access) {
    int64_t begins = when > *free_at ? when : *free_at;
    if (begins - when > access->queue_ns)
        return -1;
    return *free_at = begins + (int64_t)(packet->on_wire * access->ns_per_byte);
}

/* Set what a packet is on the wire: the kernel leaves `gso_size` bytes of payload to each, with the headers of all. */
static void measure(struct packet *packet, const struct access *access) {
    const struct virtio_net_hdr *header = (const void *)packet->bytes;
    const unsigned char *ip = packet->bytes + sizeof *header;
    int64_t length = packet->length - sizeof *header;
    packet->count = 1;
    if (header->gso_type != VIRTIO_NET_HDR_GSO_NONE && header->gso_size) {
        int64_t ip_header = 4 * (ip[0] & 15), headers = ip_header + 4 * (ip[ip_header + 12] >> 4);
        packet->count = (length - headers + header->gso_size - 1) / header->gso_size;
        length += (packet->count - 1) * headers;
    }
    packet->on_wire = length + packet->count * access->framing;
}

/* Read one packet from a host onto its line up; 0 if there was none to read. */
static int read_from(struct host *host, int device, int hosts, const struct access *access, struct traffic *traffic) {
    static _Thread_local unsigned char bytes[LONGEST];
    const unsigned char *ip = bytes + sizeof(struct virtio_net_hdr);
    ssize_t length = read(device, bytes, sizeof bytes);
    if (length <= 0)
        return 0;
    int hearer = ip[19] - 1; /* where the address that IPv4 sends to ends */
    if (length < (ssize_t)sizeof(struct virtio_net_hdr) + 20 || ip[0] >> 4 != 4 || hearer < 0 || hearer >= hosts)
        return 1; /* what the kernel announces over IPv6, or to all */
    struct packet *packet = malloc(sizeof *packet + length);
    if (!packet)
        return 1;
    packet->hearer = hearer;
    packet->length = length;
    memcpy(packet->bytes, bytes, length);
    measure(packet, access);
    int64_t gone = sent(&host->up_free, now(), packet, access);
    if (gone < 0) {
        traffic->dropped += packet->count;
        free(packet);
        return 1;
    }
    packet->due = gone + access->latency_ns;
    append(&host->flying, packet);
    return 1;
}

/* The host whose packet is the next to reach the far end by `time`, or -1. */
static int next_flying(const struct host *all, int hosts, int64_t time) {
    int next = -1;
    for (int i = 0; i < hosts; i++)
        if (all[i].flying.first && all[i].flying.first->due <= time) {
            time = all[i].flying.first->due;
            next = i;
        }
    return next;
}

/* Move on and deliver all that is due. */
static void move_on(struct host *all, const int *devices, int hosts, const struct access *access,
                    struct traffic *traffic) {
    int64_t time = now();
    for (int i; (i = next_flying(all, hosts, time)) >= 0;) {
        struct packet *packet = take(&all[i].flying);
        int64_t arrived = sent(&all[packet->hearer].down_free, packet->due, packet, access);
        if (arrived < 0) {
            traffic->dropped += packet->count;
            free(packet);
        } else {
            packet->due = arrived;
            append(&all[packet->hearer].coming, packet);
        }
    }
    for (int i = 0; i < hosts; i++)
        while (all[i].coming.first && all[i].coming.first->due <= time) {
            struct packet *packet = take(&all[i].coming);
            traffic->delivered += packet->count;
            if (now() - packet->due > LATE_NS)
                traffic->late += packet->count;
            if (write(devices[i], packet->bytes, packet->length) < 0) {
                /* the host has gone, and what was sent to it is lost */
            }
            free(packet);
        }
}

/* When the next packet is due, or -1. */
static int64_t next_due(const struct host *all, int hosts) {
    int64_t due = -1;
    for (int i = 0; i < hosts; i++) {
        const struct packet *first[] = {all[i].flying.first, all[i].coming.first};
        for (int k = 0; k < 2; k++)
            if (first[k] && (due < 0 || first[k]->due < due))
                due = first[k]->due;
    }
    return due;
}

static void drop_all(struct queue *queue) {
    while (queue->first)
        free(take(queue));
}

/* Carry packets between the devices until `stop` can be read. Returns 0, or an errno. */
int carry(int hosts, const int *devices, int stop, const struct access *access, struct traffic *traffic) {
    struct host *all = calloc(hosts, sizeof *all);
    struct pollfd *polled = calloc(hosts + 1, sizeof *polled);
    int error = 0;
    if (!all || !polled) {
        error = ENOMEM;
        goto end;
    }
    for (int i = 0; i < hosts; i++)
        polled[i] = (struct pollfd){.fd = devices[i], .events = POLLIN};
    polled[hosts] = (struct pollfd){.fd = stop, .events = POLLIN};
    while (!polled[hosts].revents) {
        move_on(all, devices, hosts, access, traffic);
        int64_t due = next_due(all, hosts), wait = due - now();
        if (wait < 0)
            wait = 0;
        struct timespec timeout = {wait / 1000000000, wait % 1000000000};
        if (ppoll(polled, hosts + 1, due < 0 ? NULL : &timeout, NULL) < 0) {
            if (errno == EINTR)
                continue;
            error = errno;
            break;
        }
        for (int i = 0; i < hosts; i++) {
            if (polled[i].revents & ~POLLIN)
                polled[i].fd = -1; /* its device has gone */
            else if (polled[i].revents)
                for (int k = 0; k < READ_AT_ONCE; k++)
                    if (!read_from(&all[i], devices[i], hosts, access, traffic))
                        break;
        }
    }
    for (int i = 0; i < hosts; i++) {
        drop_all(&all[i].flying);
        drop_all(&all[i].coming);
    }
end:
    free(polled);
    free(all);
    return error;
}
