/* Code that is not Python's, and waits in a futex. */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <linux/futex.h>
#include <pthread.h>
#include <stddef.h>
#include <sys/syscall.h>
#include <unistd.h>

static pthread_mutex_t mutex = PTHREAD_MUTEX_INITIALIZER;
static pthread_cond_t condition = PTHREAD_COND_INITIALIZER;

static void *forever(void *unused) {
    pause();
    return unused;
}

void rest(int how) {
    int (*wait)(pthread_cond_t *, pthread_mutex_t *) = dlsym(RTLD_DEFAULT, "pthread_cond_wait");
    pthread_t thread;
    int word = 0;
    pthread_mutex_lock(&mutex);
    if (how == 0)
        for (;;) pthread_cond_wait(&condition, &mutex);
    if (how == 1)
        for (;;) wait(&condition, &mutex);
    if (how == 2 && pthread_create(&thread, NULL, forever, NULL) == 0)
        pthread_join(thread, NULL);
    if (how == 3)
        for (;;) syscall(SYS_futex, &word, FUTEX_WAIT, 0, NULL, NULL, 0);
}
