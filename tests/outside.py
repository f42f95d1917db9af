"""Detects connections to other machines by a process or its children: a preloaded library refuses and records them."""

from __future__ import annotations

import subprocess
from dataclasses import dataclass
from pathlib import Path

# In C, not a Python hook: a child with -I -S, as templates use, reads neither PYTHONPATH nor sitecustomize.
_SOURCE = r"""
#define _GNU_SOURCE
#include <arpa/inet.h>
#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <netdb.h>
#include <netinet/in.h>
#include <stdio.h>
#include <string.h>
#include <sys/socket.h>
#include <unistd.h>

static int refused(const char *call, const char *where)
{
    int file = open(RECORD, O_WRONLY | O_APPEND | O_CREAT | O_CLOEXEC, 0600);
    dprintf(file, "%s %s\n", call, where);
    close(file);
    errno = ENETUNREACH;
    return -1;
}

static int outside(const struct sockaddr *to, char *where)
{
    if (to && to->sa_family == AF_INET) {
        const struct in_addr *at = &((const struct sockaddr_in *)to)->sin_addr;
        inet_ntop(AF_INET, at, where, INET6_ADDRSTRLEN);
        return ntohl(at->s_addr) >> 24 != 127;
    }
    if (to && to->sa_family == AF_INET6) {
        const struct in6_addr *at = &((const struct sockaddr_in6 *)to)->sin6_addr;
        inet_ntop(AF_INET6, at, where, INET6_ADDRSTRLEN);
        return !IN6_IS_ADDR_LOOPBACK(at) && !(IN6_IS_ADDR_V4MAPPED(at) && at->s6_addr[12] == 127);
    }
    return 0;
}

int connect(int fd, const struct sockaddr *to, socklen_t size)
{
    int (*real)(int, const struct sockaddr *, socklen_t) = dlsym(RTLD_NEXT, "connect");
    char where[INET6_ADDRSTRLEN];
    return outside(to, where) ? refused("connect", where) : real(fd, to, size);
}

ssize_t sendto(int fd, const void *data, size_t length, int flags, const struct sockaddr *to, socklen_t size)
{
    ssize_t (*real)(int, const void *, size_t, int, const struct sockaddr *, socklen_t) = dlsym(RTLD_NEXT, "sendto");
    char where[INET6_ADDRSTRLEN];
    return outside(to, where) ? refused("sendto", where) : real(fd, data, length, flags, to, size);
}

int getaddrinfo(const char *node, const char *service, const struct addrinfo *hints, struct addrinfo **found)
{
    int (*real)(const char *, const char *, const struct addrinfo *, struct addrinfo **) = dlsym(RTLD_NEXT,
    "getaddrinfo"); char address[sizeof(struct in6_addr)];
    if (node && strcmp(node, "localhost") && inet_pton(AF_INET, node, address) != 1 && inet_pton(AF_INET6, node,
    address) != 1) {
        refused("getaddrinfo", node);
        return EAI_FAIL;
    }
    return real(node, service, hints, found);
}
"""


@dataclass(frozen=True)
class Outside:
    """The library, for LD_PRELOAD, and its log file."""

    library: Path
    record: Path

    def asked(self) -> list[str]:
        """The refused attempts so far, such as "connect 192.0.2.1"."""
        return self.record.read_text().splitlines() if self.record.exists() else []


def build_outside(folder: Path) -> Outside:
    """Compile it into `folder`; this takes about a second."""
    made = Outside(folder / "outside.so", folder / "asked.txt")
    source = folder / "outside.c"
    source.write_text(_SOURCE)
    command = [
        "cc",
        "-O1",
        "-shared",
        "-fPIC",
        f'-DRECORD="{made.record}"',
        str(source),
        "-o",
        str(made.library),
        "-ldl",
    ]
    subprocess.run(command, check=True)
    return made
