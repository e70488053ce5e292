/* Record every fsync and fdatasync below one folder; power_loss.py reads the records.
 *
 * The shim is loaded with LD_PRELOAD. For each successful sync it appends one line to the file `log`:
 *     file <tab> inode <tab> size
 *     dir <tab> inode { <tab> name <tab> inode of the entry }
 * It also links each synced file into the records folder, under the number of its inode. So the content of a deleted
 * file can be restored, and the system does not use the number for another file.
 */
#define _GNU_SOURCE
#include <dirent.h>
#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <limits.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

static void fail(const char *what) {
    perror(what);
    abort();
}

/* Return whether the descriptor belongs to the folder or to something below it. */
static int is_watched(int fd) {
    const char *folder = getenv("POWER_LOSS_FOLDER");
    char link[64], path[PATH_MAX];
    snprintf(link, sizeof link, "/proc/self/fd/%d", fd);
    ssize_t length = readlink(link, path, sizeof path - 1);
    if (folder == NULL || length < 0) return 0;
    path[length] = 0;
    size_t prefix = strlen(folder);
    return strncmp(path, folder, prefix) == 0 && (path[prefix] == 0 || path[prefix] == '/');
}

static int open_records(void) {
    int records = open(getenv("POWER_LOSS_RECORDS"), O_RDONLY | O_DIRECTORY | O_CLOEXEC);
    if (records < 0) fail("power_loss_shim: open records");
    return records;
}

static void link_file(int from, const char *name, ino_t inode, int flags) {
    int records = open_records();
    char number[32];
    snprintf(number, sizeof number, "%llu", (unsigned long long)inode);
    /* ENOENT: the file was deleted before the sync. */
    if (linkat(from, name, records, number, flags) != 0 && errno != EEXIST && errno != ENOENT)
        fail("power_loss_shim: link");
    close(records);
}

static void append_to_log(const char *line, size_t length) {
    int records = open_records();
    int log = openat(records, "log", O_WRONLY | O_APPEND | O_CREAT | O_CLOEXEC, 0600);
    if (log < 0 || write(log, line, length) != (ssize_t)length) fail("power_loss_shim: log");
    close(log);
    close(records);
}

/* Return a line with the entries of a folder. */
static char *describe_folder(int fd, ino_t inode, size_t *length) {
    char *line;
    FILE *text = open_memstream(&line, length);
    int copy = openat(fd, ".", O_RDONLY | O_DIRECTORY | O_CLOEXEC);
    DIR *entries = copy < 0 ? NULL : fdopendir(copy);
    if (text == NULL || entries == NULL) fail("power_loss_shim: list folder");
    fprintf(text, "dir\t%llu", (unsigned long long)inode);
    for (struct dirent *entry; (entry = readdir(entries)) != NULL;) {
        struct stat status;
        if (strcmp(entry->d_name, ".") == 0 || strcmp(entry->d_name, "..") == 0) continue;
        if (fstatat(fd, entry->d_name, &status, AT_SYMLINK_NOFOLLOW) != 0) continue;
        if (S_ISREG(status.st_mode)) link_file(fd, entry->d_name, status.st_ino, 0);
        fprintf(text, "\t%s\t%llu", entry->d_name, (unsigned long long)status.st_ino);
    }
    fputc('\n', text);
    closedir(entries);
    fclose(text);
    return line;
}

static char *describe_file(int fd, const struct stat *status, size_t *length) {
    char link[64], *line;
    snprintf(link, sizeof link, "/proc/self/fd/%d", fd);
    link_file(AT_FDCWD, link, status->st_ino, AT_SYMLINK_FOLLOW);
    int written = asprintf(&line, "file\t%llu\t%lld\n", (unsigned long long)status->st_ino, (long long)status->st_size);
    if (written < 0) fail("power_loss_shim: describe file");
    *length = written;
    return line;
}

/* Sync and record what was there before: bytes that another thread writes meanwhile may not be included. */
static int recorded_sync(int fd, const char *function) {
    int (*real)(int) = (int (*)(int))dlsym(RTLD_NEXT, function);
    struct stat status;
    if (!is_watched(fd) || fstat(fd, &status) != 0 || !(S_ISREG(status.st_mode) || S_ISDIR(status.st_mode)))
        return real(fd);
    size_t length;
    char *line = S_ISDIR(status.st_mode) ? describe_folder(fd, status.st_ino, &length)
                                         : describe_file(fd, &status, &length);
    int result = real(fd);
    int error = errno;
    if (result == 0) append_to_log(line, length);
    free(line);
    errno = error;
    return result;
}

int fsync(int fd) { return recorded_sync(fd, "fsync"); }

int fdatasync(int fd) { return recorded_sync(fd, "fdatasync"); }
