/* Faults at an exact moment of a process: loaded before libc, it counts the calls that change files and acts on one.
 *
 *   FAULT_UNDER  path prefixes, apart by ':': only calls on files below one of them count
 *   FAULT_MATCH  a part of the path that must be there as well (optional)
 *   FAULT_AT     the number of the call that is hit, from 1; 0 or unset: none, calls are only written down
 *   FAULT_KIND   `stop` halts the process before the call, an error number makes the call fail with it, `slow` delays it
 *   FAULT_LASTS  1: every later call is hit as well
 *   FAULT_LOG    a file that gets one line per counted call
 *   FAULT_CLOCK  seconds by which the wall clock jumps at the first counted call that is hit (kind `clock`)
 *
 * It is for tests of this project alone. What it wraps is what CPython calls.
 */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <limits.h>
#include <signal.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <sys/time.h>
#include <sys/uio.h>
#include <time.h>
#include <unistd.h>

static long counted = 0;
static int clock_jumped = 0;
static __thread int inside = 0;

static const char *setting(const char *name) {
    const char *value = getenv(name);
    return value && *value ? value : NULL;
}

static int is_under(const char *path) {
    const char *prefixes = setting("FAULT_UNDER"), *match = setting("FAULT_MATCH");
    if (!prefixes || (match && !strstr(path, match)))
        return 0;
    while (*prefixes) {
        size_t length = strcspn(prefixes, ":");
        if (length && !strncmp(path, prefixes, length) && (path[length] == '/' || !path[length]))
            return 1;
        prefixes += length + (prefixes[length] == ':');
    }
    return 0;
}

static void path_of_handle(int handle, char *path) {
    char link[64];
    snprintf(link, sizeof link, "/proc/self/fd/%d", handle);
    ssize_t length = syscall(SYS_readlinkat, AT_FDCWD, link, path, PATH_MAX - 1);
    path[length > 0 ? length : 0] = 0;
}

static void path_of_name(int folder, const char *name, char *path) {
    if (!name)
        name = "";
    if (name[0] == '/') {
        snprintf(path, PATH_MAX, "%s", name);
        return;
    }
    char base[PATH_MAX];
    if (folder != AT_FDCWD)
        path_of_handle(folder, base);
    else if (syscall(SYS_getcwd, base, sizeof base) < 0)
        base[0] = 0;
    snprintf(path, PATH_MAX, "%.2000s/%.2000s", base, name);
}

static void write_down(const char *call, const char *path) {
    const char *log = setting("FAULT_LOG");
    if (!log)
        return;
    int handle = syscall(SYS_openat, AT_FDCWD, log, O_WRONLY | O_APPEND | O_CREAT | O_CLOEXEC, 0644);
    if (handle < 0)
        return;
    char line[PATH_MAX + 64];
    int length = snprintf(line, sizeof line, "%s %s\n", call, path);
    syscall(SYS_write, handle, line, length);
    syscall(SYS_close, handle);
}

/* The error that the call must fail with, or 0 */
static int hit(const char *call, const char *path) {
    if (!is_under(path))
        return 0;
    long number = __atomic_add_fetch(&counted, 1, __ATOMIC_SEQ_CST);
    write_down(call, path);
    const char *at = setting("FAULT_AT"), *kind = setting("FAULT_KIND"), *lasts = setting("FAULT_LASTS");
    long wanted = at ? atol(at) : 0;
    if (!wanted || !kind || !(number == wanted || (lasts && number > wanted)))
        return 0;
    if (!strcmp(kind, "stop")) {
        syscall(SYS_kill, getpid(), SIGSTOP);
        return 0;
    }
    if (!strcmp(kind, "slow")) {
        struct timespec pause = {0, 30 * 1000 * 1000};
        syscall(SYS_nanosleep, &pause, NULL);
        return 0;
    }
    if (!strcmp(kind, "clock")) {
        clock_jumped = 1;
        return 0;
    }
    return atoi(kind);
}

static int refused(int error) {
    if (error)
        errno = error;
    return error;
}

#define REAL(name) ((__typeof__(&name))dlsym(RTLD_NEXT, #name))

#define WITH_HANDLE(result, name, handle, parameters, arguments)                                                     \
    result name parameters {                                                                                         \
        static __typeof__(&name) real = NULL;                                                                        \
        if (!real)                                                                                                   \
            real = REAL(name);                                                                                       \
        if (!inside) {                                                                                               \
            char path[PATH_MAX];                                                                                     \
            inside = 1;                                                                                              \
            path_of_handle(handle, path);                                                                            \
            int error = hit(#name, path);                                                                            \
            inside = 0;                                                                                              \
            if (refused(error))                                                                                      \
                return -1;                                                                                           \
        }                                                                                                            \
        return real arguments;                                                                                       \
    }

#define WITH_NAME(name, folder, file, parameters, arguments)                                                         \
    int name parameters {                                                                                            \
        static __typeof__(&name) real = NULL;                                                                        \
        if (!real)                                                                                                   \
            real = REAL(name);                                                                                       \
        if (!inside) {                                                                                               \
            char path[PATH_MAX];                                                                                     \
            inside = 1;                                                                                              \
            path_of_name(folder, file, path);                                                                        \
            int error = hit(#name, path);                                                                            \
            inside = 0;                                                                                              \
            if (refused(error))                                                                                      \
                return -1;                                                                                           \
        }                                                                                                            \
        return real arguments;                                                                                       \
    }

WITH_HANDLE(ssize_t, write, fd, (int fd, const void *data, size_t size), (fd, data, size))
WITH_HANDLE(ssize_t, pwrite, fd, (int fd, const void *data, size_t size, off_t at), (fd, data, size, at))
WITH_HANDLE(ssize_t, writev, fd, (int fd, const struct iovec *parts, int count), (fd, parts, count))
WITH_HANDLE(int, fsync, fd, (int fd), (fd))
WITH_HANDLE(int, fdatasync, fd, (int fd), (fd))
WITH_HANDLE(int, ftruncate, fd, (int fd, off_t size), (fd, size))
WITH_HANDLE(int, fchmod, fd, (int fd, mode_t mode), (fd, mode))

WITH_NAME(rename, AT_FDCWD, to, (const char *from, const char *to), (from, to))
WITH_NAME(renameat, there, to, (int here, const char *from, int there, const char *to), (here, from, there, to))
WITH_NAME(mkdir, AT_FDCWD, name, (const char *name, mode_t mode), (name, mode))
WITH_NAME(mkdirat, folder, name, (int folder, const char *name, mode_t mode), (folder, name, mode))
WITH_NAME(symlink, AT_FDCWD, name, (const char *target, const char *name), (target, name))
WITH_NAME(symlinkat, folder, name, (const char *target, int folder, const char *name), (target, folder, name))
WITH_NAME(link, AT_FDCWD, to, (const char *from, const char *to), (from, to))
WITH_NAME(unlink, AT_FDCWD, name, (const char *name), (name))
WITH_NAME(unlinkat, folder, name, (int folder, const char *name, int flags), (folder, name, flags))
WITH_NAME(rmdir, AT_FDCWD, name, (const char *name), (name))
WITH_NAME(chmod, AT_FDCWD, name, (const char *name, mode_t mode), (name, mode))
WITH_NAME(utimensat, folder, name, (int folder, const char *name, const struct timespec times[2], int flags),
          (folder, name, times, flags))

static int opened(const char *call, int folder, const char *name, int flags, mode_t mode) {
    if (!inside && (flags & (O_CREAT | O_WRONLY | O_RDWR | O_TRUNC))) {
        char path[PATH_MAX];
        inside = 1;
        path_of_name(folder, name, path);
        int error = hit(call, path);
        inside = 0;
        if (refused(error))
            return -1;
    }
    return syscall(SYS_openat, folder, name, flags, mode);
}

#define OPENED(name, folder, parameters)                                                                             \
    int name parameters {                                                                                            \
        va_list rest;                                                                                                \
        va_start(rest, flags);                                                                                       \
        mode_t mode = flags & (O_CREAT | O_TMPFILE) ? va_arg(rest, mode_t) : 0;                                      \
        va_end(rest);                                                                                                \
        return opened("open", folder, path, flags, mode);                                                            \
    }
OPENED(open, AT_FDCWD, (const char *path, int flags, ...))
OPENED(open64, AT_FDCWD, (const char *path, int flags, ...))
OPENED(openat, folder, (int folder, const char *path, int flags, ...))
OPENED(openat64, folder, (int folder, const char *path, int flags, ...))

int clock_gettime(clockid_t which, struct timespec *now) {
    int result = syscall(SYS_clock_gettime, which, now);
    const char *jump = setting("FAULT_CLOCK");
    if (!result && which == CLOCK_REALTIME && clock_jumped && jump)
        now->tv_sec += atol(jump);
    return result;
}

time_t time(time_t *now) {
    struct timespec exact;
    clock_gettime(CLOCK_REALTIME, &exact);
    if (now)
        *now = exact.tv_sec;
    return exact.tv_sec;
}
