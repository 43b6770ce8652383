/* Threads in calls that a ptrace stop ends with EINTR (signal(7)), each of which ends the process then. */
#define _GNU_SOURCE
#include <errno.h>
#include <pthread.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <sys/epoll.h>
#include <sys/sem.h>
#include <sys/socket.h>
#include <sys/time.h>
#include <time.h>
#include <unistd.h>

#define LONG_S 10000

static void disturbed(const char *call) {
    fprintf(stderr, "%s: %s\n", call, errno == EINTR ? "EINTR" : "another error");
    _exit(3);
}

static void *receive(void *unused) {
    int ends[2];
    char byte;
    struct timeval limit = {LONG_S, 0};
    if (socketpair(AF_UNIX, SOCK_STREAM, 0, ends) || setsockopt(ends[0], SOL_SOCKET, SO_RCVTIMEO, &limit, sizeof limit))
        disturbed("socketpair");
    if (recv(ends[0], &byte, 1, 0) < 0) disturbed("recv");
    return unused;
}

static void *lower(void *semaphore) {
    struct sembuf down = {0, -1, 0};
    if (semop(*(int *)semaphore, &down, 1) < 0) disturbed("semop");
    return semaphore;
}

static void *poll_events(void *unused) {
    struct epoll_event event;
    if (epoll_wait(epoll_create1(0), &event, 1, LONG_S * 1000) < 0) disturbed("epoll_wait");
    return unused;
}

static void *ticks(void *unused) {
    sigset_t alarm;
    struct itimerval often = {{0, 100000}, {0, 100000}};
    struct timespec limit = {LONG_S, 0};
    sigemptyset(&alarm);
    sigaddset(&alarm, SIGALRM);
    if (setitimer(ITIMER_REAL, &often, NULL)) disturbed("setitimer");
    for (;;)
        if (sigtimedwait(&alarm, NULL, &limit) != SIGALRM) disturbed("sigtimedwait");
    return unused;
}

void begin(int semaphore) {
    static int id;
    void *(*waits[])(void *) = {receive, lower, poll_events, ticks};
    sigset_t every;
    id = semaphore;
    sigfillset(&every);
    pthread_sigmask(SIG_BLOCK, &every, NULL);
    for (int number = 0; number < 4; number++) {
        pthread_t thread;
        pthread_create(&thread, NULL, waits[number], &id);
    }
}
