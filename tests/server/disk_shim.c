/* A layer over the file calls of one process, for tests of power loss, disk faults and clock jumps.
 *
 * LD_PRELOAD loads it; disk_shim.py compiles, configures and reads it. It does nothing until
 * shim_configure(ROOT, LOG, CONTROL) is called, or the process starts with PLANISH_SHIM_ROOT,
 * PLANISH_SHIM_LOG and PLANISH_SHIM_CONTROL. Then
 *
 *   - every successful change below ROOT, and every sync, is appended to LOG as a record;
 *   - the calls below ROOT are counted in CONTROL, which says which of them must fail, and how;
 *   - fsync and fdatasync below ROOT return at once, because LOG defines what is on the disk. With
 *     `ignores_syncs` in CONTROL they are not recorded either;
 *   - CLOCK_REALTIME is shifted by `clock_offset` of CONTROL;
 *   - allocations of `allocation_size` bytes or more are counted in CONTROL, which says which of them
 *     fails: malloc, calloc, realloc, memalign and what uses them. mmap is not covered.
 *
 * A record is written after its call, under a mutex: the order of the records is the order of the
 * calls. Changes through mmap are not seen; SQLite maps only its -shm file, which no power loss
 * keeps anyway. Libraries that call the kernel without libc are not seen either: safetensors renames
 * its files so, which OPEN shows when the file is opened under its new name. The shim itself calls
 * the kernel directly, so no symbol of libc has to be looked up.
 */
#define _GNU_SOURCE
#include <errno.h>
#include <fcntl.h>
#include <limits.h>
#include <pthread.h>
#include <signal.h>
#include <stdarg.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <sys/time.h>
#include <sys/uio.h>
#include <time.h>
#include <unistd.h>

enum { CREATE = 1, WRITE, TRUNCATE, MKDIR, RENAME, LINK, UNLINK, RMDIR, SYNC, OPEN, FAILED_SYNC };

struct record {
  uint32_t kind;
  uint32_t size;  /* bytes that follow: data, or one or two paths below ROOT that end with 0 */
  uint64_t inode; /* of the file or directory that was changed or synced */
  int64_t offset; /* of a write, the new size of a file, or the number of records before a sync */
};

/* Kept equal to Control in disk_shim.py. */
struct control {
  int64_t clock_offset; /* nanoseconds */
  int64_t calls;        /* calls below ROOT so far */
  int64_t fail_at;      /* the number of the first call that fails, from 1; 0: none */
  int64_t fail_count;   /* how many calls fail */
  int64_t fail_errno;   /* 0: the call kills the process instead */
  int64_t failed; /* calls that did fail */
  int64_t ignores_syncs;
  int64_t sync_delay; /* microseconds that a sync takes */
  int64_t allocation_size; /* allocations of at least so many bytes count */
  int64_t allocations;     /* since fail_allocation was set */
  int64_t fail_allocation; /* the number of the allocation that fails, from 1; 0: none */
  int64_t failed_allocations;
  int64_t is_busy;      /* whether a call has begun that is not recorded yet */
  int64_t record_delay; /* microseconds between a call and its record */
  char failed_call[64];
};

static char root[PATH_MAX];
static size_t root_size;
static int log_fd = -1;
static struct control *control;
static int64_t records;
static pthread_mutex_t mutex = PTHREAD_MUTEX_INITIALIZER;

int shim_configure(const char *new_root, const char *log, const char *control_file) {
  int fd = syscall(SYS_openat, AT_FDCWD, control_file, O_RDWR | O_CLOEXEC, 0);
  if (fd < 0) return -1;
  void *mapped = mmap(NULL, sizeof(struct control), PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
  syscall(SYS_close, fd);
  if (mapped == MAP_FAILED) return -1;
  int log_low = syscall(SYS_openat, AT_FDCWD, log, O_WRONLY | O_CREAT | O_APPEND | O_CLOEXEC, 0600);
  if (log_low < 0) return -1;
  snprintf(root, sizeof root, "%s", new_root);
  root_size = strlen(root);
  log_fd = log_low;
  control = mapped;
  control->is_busy = 0;
  return 0;
}

__attribute__((constructor)) static void configure_from_environment(void) {
  const char *from = getenv("PLANISH_SHIM_ROOT"), *log = getenv("PLANISH_SHIM_LOG"),
             *file = getenv("PLANISH_SHIM_CONTROL");
  if (from && log && file && shim_configure(from, log, file)) {
    perror("disk_shim");
    _exit(97);
  }
}

/* Return whether `path`, which is absolute and normal, is ROOT or below it. */
static int is_below(const char *path) {
  return control && !strncmp(path, root, root_size) &&
         (path[root_size] == '/' || path[root_size] == 0);
}

static int path_of(int fd, char *out) {
  char link[64];
  snprintf(link, sizeof link, "/proc/self/fd/%d", fd);
  ssize_t size = syscall(SYS_readlinkat, AT_FDCWD, link, out, PATH_MAX - 1);
  if (size < 0) return -1;
  out[size] = 0;
  return 0;
}

static int is_file_below(int fd) {
  if (!control || fd < 0) return 0;
  char path[PATH_MAX];
  int before = errno, found = !path_of(fd, path) && is_below(path);
  errno = before;
  return found;
}

/* Make a path absolute, without ".", ".." and double slashes. Return whether it is below ROOT. */
static int resolve(int directory, const char *path, char *out) {
  char joined[2 * PATH_MAX], base[PATH_MAX];
  int before = errno;
  if (!control || !path) return 0;
  if (path[0] == '/') {
    snprintf(joined, sizeof joined, "%s", path);
  } else {
    if (directory == AT_FDCWD ? syscall(SYS_getcwd, base, sizeof base) < 0 : path_of(directory, base)) {
      errno = before;
      return 0;
    }
    snprintf(joined, sizeof joined, "%s/%s", base, path);
  }
  size_t used = 0;
  char *rest = joined;
  for (char *part; (part = strsep(&rest, "/"));) {
    if (!*part || !strcmp(part, ".")) continue;
    if (!strcmp(part, "..")) {
      while (used && out[--used] != '/') {}
      continue;
    }
    if (used + strlen(part) + 2 > PATH_MAX) return 0;
    used += sprintf(out + used, "/%s", part);
  }
  out[used] = 0;
  errno = before;
  return is_below(out);
}

static void record(uint32_t kind, uint64_t inode, int64_t offset, const struct iovec *parts, int count) {
  struct record head = {kind, 0, inode, offset};
  struct iovec all[18] = {{&head, sizeof head}};
  for (int i = 0; i < count; i++) {
    all[i + 1] = parts[i];
    head.size += parts[i].iov_len;
  }
  int before = errno;
  if (control->record_delay) usleep(control->record_delay);
  ssize_t written = syscall(SYS_writev, log_fd, all, count + 1);
  if (written != (ssize_t)(sizeof head + head.size)) {
    static const char message[] = "disk_shim: the log cannot be written\n";
    syscall(SYS_write, 2, message, sizeof message - 1);
    syscall(SYS_exit_group, 98);
  }
  records++;
  errno = before;
}

static void record_paths(uint32_t kind, uint64_t inode, const char *one, const char *other) {
  struct iovec parts[2] = {{(void *)(one + root_size), strlen(one + root_size) + 1}};
  if (other) parts[1] = (struct iovec){(void *)(other + root_size), strlen(other + root_size) + 1};
  record(kind, inode, 0, parts, other ? 2 : 1);
}

/* Return whether a call may need space on the disk. `create` is an open that creates a file. */
static int may_allocate(const char *name) {
  static const char *const others[] = {"open", "read", "unlink", "rmdir"};
  for (size_t i = 0; i < sizeof others / sizeof *others; i++)
    if (!strcmp(name, others[i])) return 0;
  return 1;
}

/* Count a call below ROOT. Return 1 with errno if it must fail. Call it with the mutex. Only calls
 * that may need space count among the calls of which one fails with ENOSPC. */
static int must_fail(const char *name) {
  if (control->fail_at && control->fail_errno == ENOSPC && !may_allocate(name)) return 0;
  int64_t number = ++control->calls;
  if (!control->fail_at || number < control->fail_at ||
      number >= control->fail_at + control->fail_count)
    return 0;
  if (!control->failed++) snprintf(control->failed_call, sizeof control->failed_call, "%s", name);
  if (!control->fail_errno) kill(getpid(), SIGKILL);
  dprintf(2, "disk_shim: %s fails with errno %d\n", name, (int)control->fail_errno);
  errno = control->fail_errno;
  return 1;
}

static uint64_t inode_of(int fd) {
  struct stat found;
  int before = errno;
  uint64_t inode = fstat(fd, &found) ? 0 : found.st_ino;
  errno = before;
  return inode;
}

static uint64_t inode_at(const char *path) {
  struct stat found;
  int before = errno;
  uint64_t inode = lstat(path, &found) ? 0 : found.st_ino;
  errno = before;
  return inode;
}

#define LOCKED(...)                                            \
  do {                                                         \
    pthread_mutex_lock(&mutex);                                \
    __atomic_store_n(&control->is_busy, 1, __ATOMIC_SEQ_CST);  \
    __VA_ARGS__;                                               \
    __atomic_store_n(&control->is_busy, 0, __ATOMIC_SEQ_CST);  \
    pthread_mutex_unlock(&mutex);                              \
  } while (0)

static int opened(int directory, const char *path, int flags, mode_t mode) {
  char full[PATH_MAX];
  if (!resolve(directory, path, full)) return syscall(SYS_openat, directory, path, flags, mode);
  int fd = -1;
  LOCKED({
    int is_there = inode_at(full) != 0;
    if (!must_fail(flags & O_CREAT && !is_there ? "create" : "open")) {
      int was_there = !(flags & (O_CREAT | O_TRUNC)) || is_there;
      fd = syscall(SYS_openat, directory, path, flags, mode);
      if (fd >= 0) {
        record_paths(was_there ? OPEN : CREATE, inode_of(fd), full, NULL);
        if (was_there && (flags & O_TRUNC)) record(TRUNCATE, inode_of(fd), 0, NULL, 0);
      }
    }
  });
  return fd;
}

#define MODE_OF(flags, last)                           \
  mode_t mode = 0;                                     \
  if ((flags) & (O_CREAT | __O_TMPFILE)) {             \
    va_list arguments;                                 \
    va_start(arguments, last);                         \
    mode = va_arg(arguments, mode_t);                  \
    va_end(arguments);                                 \
  }

int open(const char *path, int flags, ...) {
  MODE_OF(flags, flags)
  return opened(AT_FDCWD, path, flags, mode);
}
int open64(const char *path, int flags, ...) {
  MODE_OF(flags, flags)
  return opened(AT_FDCWD, path, flags, mode);
}
int openat(int directory, const char *path, int flags, ...) {
  MODE_OF(flags, flags)
  return opened(directory, path, flags, mode);
}
int openat64(int directory, const char *path, int flags, ...) {
  MODE_OF(flags, flags)
  return opened(directory, path, flags, mode);
}
int creat(const char *path, mode_t mode) {
  return opened(AT_FDCWD, path, O_CREAT | O_WRONLY | O_TRUNC, mode);
}
int creat64(const char *path, mode_t mode) { return creat(path, mode); }

/* `offset` is -1 for a write at the position of the file. */
static ssize_t written(const char *name, int fd, const struct iovec *parts, int count, off_t offset) {
  ssize_t size = -1;
  LOCKED({
    if (!must_fail(name)) {
      size = offset < 0 ? syscall(SYS_writev, fd, parts, count)
                        : syscall(SYS_pwritev, fd, parts, count, offset, 0);
      if (size > 0) {
        int before = errno;
        off_t end = offset < 0 ? syscall(SYS_lseek, fd, 0, SEEK_CUR) : offset + size;
        errno = before;
        struct iovec kept[17];
        size_t left = size;
        int used = 0;
        for (; left && used < count && used < 17; used++) {
          kept[used] = parts[used];
          if (kept[used].iov_len > left) kept[used].iov_len = left;
          left -= kept[used].iov_len;
        }
        if (left) {
          static const char message[] = "disk_shim: a write of too many parts\n";
          syscall(SYS_write, 2, message, sizeof message - 1);
          syscall(SYS_exit_group, 98);
        }
        record(WRITE, inode_of(fd), end - size, kept, used);
      }
    }
  });
  return size;
}

ssize_t write(int fd, const void *data, size_t size) {
  if (!is_file_below(fd)) return syscall(SYS_write, fd, data, size);
  struct iovec part = {(void *)data, size};
  return written("write", fd, &part, 1, -1);
}
ssize_t pwrite(int fd, const void *data, size_t size, off_t offset) {
  if (!is_file_below(fd)) return syscall(SYS_pwrite64, fd, data, size, offset);
  struct iovec part = {(void *)data, size};
  return written("pwrite", fd, &part, 1, offset);
}
ssize_t pwrite64(int fd, const void *data, size_t size, off_t offset) {
  return pwrite(fd, data, size, offset);
}
ssize_t writev(int fd, const struct iovec *parts, int count) {
  if (!is_file_below(fd)) return syscall(SYS_writev, fd, parts, count);
  return written("writev", fd, parts, count, -1);
}
ssize_t pwritev(int fd, const struct iovec *parts, int count, off_t offset) {
  if (!is_file_below(fd)) return syscall(SYS_pwritev, fd, parts, count, offset, 0);
  return written("pwritev", fd, parts, count, offset);
}
ssize_t pwritev64(int fd, const struct iovec *parts, int count, off_t offset) {
  return pwritev(fd, parts, count, offset);
}

/* Copies within the kernel would not be seen: say that the file system cannot do them, after which
 * Python copies with read and write. */
ssize_t sendfile(int out, int in, off_t *offset, size_t size) {
  if (!is_file_below(out)) return syscall(SYS_sendfile, out, in, offset, size);
  errno = EINVAL;
  return -1;
}
ssize_t sendfile64(int out, int in, off_t *offset, size_t size) {
  return sendfile(out, in, offset, size);
}
ssize_t copy_file_range(int in, off_t *from, int out, off_t *to, size_t size, unsigned flags) {
  if (!is_file_below(out)) return syscall(SYS_copy_file_range, in, from, out, to, size, flags);
  errno = EXDEV;
  return -1;
}

static ssize_t data_read(int fd, void *data, size_t size, off_t offset) {
  int fails = 0;
  if (is_file_below(fd)) LOCKED(fails = must_fail("read"));
  if (fails) return -1;
  return offset < 0 ? syscall(SYS_read, fd, data, size)
                    : syscall(SYS_pread64, fd, data, size, offset);
}
ssize_t read(int fd, void *data, size_t size) { return data_read(fd, data, size, -1); }
ssize_t pread(int fd, void *data, size_t size, off_t offset) {
  return data_read(fd, data, size, offset);
}
ssize_t pread64(int fd, void *data, size_t size, off_t offset) {
  return data_read(fd, data, size, offset);
}

int ftruncate(int fd, off_t size) {
  if (!is_file_below(fd)) return syscall(SYS_ftruncate, fd, size);
  int status = -1;
  LOCKED({
    if (!must_fail("ftruncate")) {
      status = syscall(SYS_ftruncate, fd, size);
      if (!status) record(TRUNCATE, inode_of(fd), size, NULL, 0);
    }
  });
  return status;
}
int ftruncate64(int fd, off_t size) { return ftruncate(fd, size); }
int truncate(const char *path, off_t size) {
  int fd = opened(AT_FDCWD, path, O_WRONLY | O_CLOEXEC, 0);
  if (fd < 0) return -1;
  int status = ftruncate(fd, size), before = errno;
  syscall(SYS_close, fd);
  errno = before;
  return status;
}
int truncate64(const char *path, off_t size) { return truncate(path, size); }

int fallocate(int fd, int mode, off_t offset, off_t size) {
  if (!is_file_below(fd)) return syscall(SYS_fallocate, fd, mode, offset, size);
  errno = EOPNOTSUPP;
  return -1;
}
int fallocate64(int fd, int mode, off_t offset, off_t size) {
  return fallocate(fd, mode, offset, size);
}

int mkdirat(int directory, const char *path, mode_t mode) {
  char full[PATH_MAX];
  if (!resolve(directory, path, full)) return syscall(SYS_mkdirat, directory, path, mode);
  int status = -1;
  LOCKED({
    if (!must_fail("mkdir")) {
      status = syscall(SYS_mkdirat, directory, path, mode);
      if (!status) record_paths(MKDIR, inode_at(full), full, NULL);
    }
  });
  return status;
}
int mkdir(const char *path, mode_t mode) { return mkdirat(AT_FDCWD, path, mode); }

int renameat2(int from, const char *old, int to, const char *new, unsigned flags) {
  char one[PATH_MAX], other[PATH_MAX];
  int first = resolve(from, old, one), second = resolve(to, new, other);
  if (!first && !second) return syscall(SYS_renameat2, from, old, to, new, flags);
  int status = -1;
  LOCKED({
    if (!first || !second) {
      errno = EXDEV;
    } else if (!must_fail("rename")) {
      status = syscall(SYS_renameat2, from, old, to, new, flags);
      if (!status) record_paths(RENAME, inode_at(other), one, other);
    }
  });
  return status;
}
int renameat(int from, const char *old, int to, const char *new) {
  return renameat2(from, old, to, new, 0);
}
int rename(const char *old, const char *new) { return renameat2(AT_FDCWD, old, AT_FDCWD, new, 0); }

int linkat(int from, const char *old, int to, const char *new, int flags) {
  char one[PATH_MAX], other[PATH_MAX];
  int first = resolve(from, old, one), second = resolve(to, new, other);
  if (!first && !second) return syscall(SYS_linkat, from, old, to, new, flags);
  int status = -1;
  LOCKED({
    if (!first || !second) {
      errno = EXDEV;
    } else if (!must_fail("link")) {
      status = syscall(SYS_linkat, from, old, to, new, flags);
      if (!status) record_paths(LINK, inode_at(other), one, other);
    }
  });
  return status;
}
int link(const char *old, const char *new) { return linkat(AT_FDCWD, old, AT_FDCWD, new, 0); }

int unlinkat(int directory, const char *path, int flags) {
  char full[PATH_MAX];
  if (!resolve(directory, path, full)) return syscall(SYS_unlinkat, directory, path, flags);
  int status = -1;
  LOCKED({
    if (!must_fail(flags & AT_REMOVEDIR ? "rmdir" : "unlink")) {
      status = syscall(SYS_unlinkat, directory, path, flags);
      if (!status) record_paths(flags & AT_REMOVEDIR ? RMDIR : UNLINK, 0, full, NULL);
    }
  });
  return status;
}
int unlink(const char *path) { return unlinkat(AT_FDCWD, path, 0); }
int rmdir(const char *path) { return unlinkat(AT_FDCWD, path, AT_REMOVEDIR); }
int remove(const char *path) {
  int status = unlink(path);
  return status && errno == EISDIR ? rmdir(path) : status;
}

/* End the process between two calls. */
void _exit(int status) {
  pthread_mutex_lock(&mutex);
  for (;;) syscall(SYS_exit_group, status);
}

static int synced(const char *name, int fd, int number) {
  if (!is_file_below(fd)) return syscall(number, fd);
  int fails = 0;
  int64_t begun = 0;
  LOCKED({
    fails = must_fail(name);
    begun = records;
    if (fails) record(FAILED_SYNC, inode_of(fd), begun, NULL, 0);
  });
  if (fails) return -1;
  if (control->ignores_syncs) return 0;
  /* Other threads may write meanwhile: such writes are not covered by this sync. */
  if (control->sync_delay) usleep(control->sync_delay);
  LOCKED(record(SYNC, inode_of(fd), begun, NULL, 0));
  return 0;
}
int fsync(int fd) { return synced("fsync", fd, SYS_fsync); }
int fdatasync(int fd) { return synced("fdatasync", fd, SYS_fdatasync); }

static int64_t now(void) {
  struct timespec real;
  syscall(SYS_clock_gettime, CLOCK_REALTIME, &real);
  return real.tv_sec * 1000000000 + real.tv_nsec + (control ? control->clock_offset : 0);
}
int clock_gettime(clockid_t clock, struct timespec *out) {
  if (clock != CLOCK_REALTIME && clock != CLOCK_REALTIME_COARSE)
    return syscall(SYS_clock_gettime, clock, out);
  int64_t at = now();
  *out = (struct timespec){at / 1000000000, at % 1000000000};
  return 0;
}
int gettimeofday(struct timeval *restrict out, void *restrict zone) {
  (void)zone;
  int64_t at = now();
  *out = (struct timeval){at / 1000000000, at % 1000000000 / 1000};
  return 0;
}
time_t time(time_t *out) {
  time_t at = now() / 1000000000;
  if (out) *out = at;
  return at;
}

/* glibc's own functions, under the names that programs with a malloc of their own use. */
extern void *__libc_malloc(size_t), *__libc_calloc(size_t, size_t), *__libc_realloc(void *, size_t),
    *__libc_memalign(size_t, size_t);

static int is_out_of_memory(size_t size) {
  if (!control || !control->fail_allocation || (int64_t)size < control->allocation_size) return 0;
  if (__atomic_add_fetch(&control->allocations, 1, __ATOMIC_SEQ_CST) != control->fail_allocation)
    return 0;
  control->failed_allocations++;
  errno = ENOMEM;
  return 1;
}
void *malloc(size_t size) { return is_out_of_memory(size) ? NULL : __libc_malloc(size); }
void *calloc(size_t count, size_t size) {
  size_t all;
  if (__builtin_mul_overflow(count, size, &all) || is_out_of_memory(all)) return NULL;
  return __libc_calloc(count, size);
}
void *realloc(void *old, size_t size) {
  return is_out_of_memory(size) ? NULL : __libc_realloc(old, size);
}
void *memalign(size_t alignment, size_t size) {
  return is_out_of_memory(size) ? NULL : __libc_memalign(alignment, size);
}
void *aligned_alloc(size_t alignment, size_t size) { return memalign(alignment, size); }
int posix_memalign(void **out, size_t alignment, size_t size) {
  int before = errno;
  void *found = memalign(alignment, size);
  errno = before;
  if (!found) return ENOMEM;
  *out = found;
  return 0;
}
