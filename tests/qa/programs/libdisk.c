/* Puts its caller into uninterruptible sleep: the parent of vfork() waits in the kernel until the child execs or ends. */
#define _GNU_SOURCE
#include <unistd.h>

void read_dead_disk(void) {
    if (vfork() == 0) {
        for (;;) pause();
    }
}
