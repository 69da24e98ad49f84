/* Preloaded: counts the calls that change files below $CRASH_DIR, in all processes together, and disturbs one of them.

   CRASH_COUNTER: a file of 16 zero bytes, shared: the count, and the number of the call to disturb (0 for none).
   CRASH_MODE: kill, torn (half of a write, then kill), eio, full (no space from there on), short (half of a write),
   log (nothing is disturbed; each call, with its data, is appended to $CRASH_LOG). */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <limits.h>
#include <signal.h>
#include <stdarg.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <sys/uio.h>
#include <unistd.h>

enum { FILES = 4096 };
static char *paths[FILES];
static const char *folder, *mode;
static volatile int64_t *counter;
static int log_fd = -1;

__attribute__((constructor)) static void start(void) {
    folder = getenv("CRASH_DIR");
    mode = getenv("CRASH_MODE");
    const char *shared = getenv("CRASH_COUNTER"), *log = getenv("CRASH_LOG");
    if (!folder || !shared) return;
    int fd = syscall(SYS_openat, AT_FDCWD, shared, O_RDWR | O_CLOEXEC);
    if (fd < 0) return;
    void *at = mmap(NULL, 16, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
    syscall(SYS_close, fd);
    if (at == MAP_FAILED) return;
    counter = at;
    if (log) log_fd = syscall(SYS_openat, AT_FDCWD, log, O_WRONLY | O_APPEND | O_CREAT | O_CLOEXEC, 0600);
}

/* For this process and its forks, in place of the environment. */
void crash_arm(const char *fault, const char *log) {
    mode = strdup(fault);
    if (log_fd >= 0) syscall(SYS_close, log_fd);
    log_fd = log ? syscall(SYS_openat, AT_FDCWD, log, O_WRONLY | O_APPEND | O_CREAT | O_CLOEXEC, 0600) : -1;
}

static int below(const char *path) {
    size_t n = folder ? strlen(folder) : 0;
    return counter && path && n && !strncmp(path, folder, n) && (path[n] == '/' || !path[n]);
}
static const char *path_of(int fd) { return counter && fd >= 0 && fd < FILES ? paths[fd] : NULL; }
static void remember(int fd, const char *path) {
    if (fd < 0 || fd >= FILES) return;
    free(paths[fd]);
    paths[fd] = path ? strdup(path) : NULL;
}

static void record(const char *op, const char *a, const char *b, int64_t offset, const void *data, size_t size) {
    if (log_fd < 0) return;
    char head[3 * PATH_MAX];
    int n = snprintf(head, sizeof head, "%s\t%s\t%s\t%lld\t%zu\n", op, a, b ? b : "", (long long)offset, data ? size : 0);
    struct iovec parts[2] = {{head, n}, {(void *)data, data ? size : 0}};
    syscall(SYS_writev, log_fd, parts, data ? 2 : 1);
}

/* 0: go on; 1: fail with errno; 2: half of it; 3: half of it, then die */
static int strike(int writes) {
    int64_t n = __sync_add_and_fetch(&counter[0], 1), target = counter[1];
    if (!target || n < target || !mode) return 0;
    if (!strcmp(mode, "full")) { errno = ENOSPC; return 1; }
    if (n > target) return 0;
    if (!strcmp(mode, "kill") || (!strcmp(mode, "torn") && !writes)) kill(getpid(), SIGKILL);
    if (!strcmp(mode, "eio")) { errno = EIO; return 1; }
    if (writes && !strcmp(mode, "short")) return 2;
    if (writes && !strcmp(mode, "torn")) return 3;
    return 0;
}

#define NEXT(name) static __typeof__(&name) next; if (!next) next = (__typeof__(&name))dlsym(RTLD_NEXT, #name)

static int opened(int fd, const char *path, int flags, int existed) {
    if (fd < 0 || ((flags & O_ACCMODE) == O_RDONLY && !(flags & O_DIRECTORY))) {
        struct stat s;
        if (fd >= 0 && !fstat(fd, &s) && S_ISDIR(s.st_mode)) remember(fd, path);
        return fd;
    }
    remember(fd, path);
    if (!existed) record("create", path, NULL, 0, NULL, 0);
    else if (flags & O_TRUNC) record("truncate", path, NULL, 0, NULL, 0);
    return fd;
}

#define OPEN(name)                                                                         \
    int name(const char *path, int flags, ...) {                                           \
        NEXT(name);                                                                        \
        va_list rest; va_start(rest, flags); mode_t bits = va_arg(rest, mode_t); va_end(rest); \
        if (!below(path)) return next(path, flags, bits);                                  \
        struct stat s; int existed = !stat(path, &s);                                      \
        int changes = (flags & O_CREAT && !existed) || flags & O_TRUNC;                    \
        if (changes && strike(0)) return -1;                                               \
        return opened(next(path, flags, bits), path, flags, existed);                      \
    }
#define OPENAT(name)                                                                       \
    int name(int at, const char *path, int flags, ...) {                                   \
        NEXT(name);                                                                        \
        va_list rest; va_start(rest, flags); mode_t bits = va_arg(rest, mode_t); va_end(rest); \
        if (!below(path)) return next(at, path, flags, bits);                              \
        struct stat s; int existed = !stat(path, &s);                                      \
        int changes = (flags & O_CREAT && !existed) || flags & O_TRUNC;                    \
        if (changes && strike(0)) return -1;                                               \
        return opened(next(at, path, flags, bits), path, flags, existed);                  \
    }
OPEN(open) OPEN(open64) OPENAT(openat) OPENAT(openat64)

int close(int fd) {
    NEXT(close);
    if (path_of(fd)) remember(fd, NULL);
    return next(fd);
}

static void wrote(int fd, const void *data, ssize_t size, off64_t offset) {
    if (size > 0) record("write", path_of(fd), NULL, offset, data, size);
}
static off64_t place(int fd) {
    int flags = fcntl(fd, F_GETFL);
    return lseek64(fd, 0, flags & O_APPEND ? SEEK_END : SEEK_CUR);
}

ssize_t write(int fd, const void *data, size_t size) {
    NEXT(write);
    if (!path_of(fd)) return next(fd, data, size);
    int what = strike(1);
    if (what == 1) return -1;
    off64_t offset = place(fd);
    ssize_t done = next(fd, data, what > 1 ? (size + 1) / 2 : size);
    if (what == 3) kill(getpid(), SIGKILL);
    wrote(fd, data, done, offset);
    return done;
}

#define PWRITE(name)                                                                       \
    ssize_t name(int fd, const void *data, size_t size, off64_t offset) {                  \
        NEXT(name);                                                                        \
        if (!path_of(fd)) return next(fd, data, size, offset);                             \
        int what = strike(1);                                                              \
        if (what == 1) return -1;                                                          \
        ssize_t done = next(fd, data, what > 1 ? (size + 1) / 2 : size, offset);           \
        if (what == 3) kill(getpid(), SIGKILL);                                            \
        wrote(fd, data, done, offset);                                                     \
        return done;                                                                       \
    }
PWRITE(pwrite) PWRITE(pwrite64)

ssize_t writev(int fd, const struct iovec *parts, int count) {
    NEXT(writev);
    if (!path_of(fd) || count < 1) return next(fd, parts, count);
    return write(fd, parts[0].iov_base, parts[0].iov_len);
}

#define SYNC(name)                                                                         \
    int name(int fd) {                                                                     \
        NEXT(name);                                                                        \
        const char *path = path_of(fd);                                                    \
        if (!path) return next(fd);                                                        \
        if (strike(0)) return -1;                                                          \
        record("sync", path, NULL, 0, NULL, 0);                                            \
        return 0; /* the test cuts the power by the log: no disk need turn */              \
    }
SYNC(fsync) SYNC(fdatasync)

#define TRUNCATE(name)                                                                     \
    int name(int fd, off64_t size) {                                                       \
        NEXT(name);                                                                        \
        if (!path_of(fd)) return next(fd, size);                                           \
        if (strike(0)) return -1;                                                          \
        record("truncate", path_of(fd), NULL, size, NULL, 0);                              \
        return next(fd, size);                                                             \
    }
TRUNCATE(ftruncate) TRUNCATE(ftruncate64)

#define ONE(name)                                                                          \
    int name(const char *path) {                                                           \
        NEXT(name);                                                                        \
        if (!below(path)) return next(path);                                               \
        if (strike(0)) return -1;                                                          \
        int failed = next(path);                                                           \
        if (!failed) record(#name, path, NULL, 0, NULL, 0);                                \
        return failed;                                                                     \
    }
#define TWO(name)                                                                          \
    int name(const char *from, const char *to) {                                           \
        NEXT(name);                                                                        \
        if (!below(from)) return next(from, to);                                           \
        if (strike(0)) return -1;                                                          \
        int failed = next(from, to);                                                       \
        if (!failed) record(#name, from, to, 0, NULL, 0);                                  \
        return failed;                                                                     \
    }
TWO(rename) TWO(link)
ONE(unlink) ONE(rmdir)
int renameat(int a, const char *from, int b, const char *to) {
    NEXT(renameat);
    return below(from) && *from == '/' ? rename(from, to) : next(a, from, b, to);
}
int renameat2(int a, const char *from, int b, const char *to, unsigned flags) {
    NEXT(renameat2);
    return below(from) && !flags ? rename(from, to) : next(a, from, b, to, flags);
}
int linkat(int a, const char *from, int b, const char *to, int flags) {
    NEXT(linkat);
    return below(from) ? link(from, to) : next(a, from, b, to, flags);
}
int unlinkat(int at, const char *path, int flags) {
    NEXT(unlinkat);
    return below(path) ? (flags & AT_REMOVEDIR ? rmdir(path) : unlink(path)) : next(at, path, flags);
}
int mkdir(const char *path, mode_t bits) {
    NEXT(mkdir);
    if (!below(path)) return next(path, bits);
    if (strike(0)) return -1;
    int failed = next(path, bits);
    if (!failed) record("mkdir", path, NULL, 0, NULL, 0);
    return failed;
}
