/* A stand-in for libnvidia-ml.so.1, for the real nvidia-ml-py: GPUs as the file $NVML_STUB_STATE describes them.
 *
 *   gpu INDEX UUID USED_BYTES TOTAL_BYTES       process INDEX PID BYTES
 *   mig INDEX INSTANCE UUID USED TOTAL          migprocess INDEX INSTANCE PID BYTES
 *   fail FUNCTION CODE [INDEX]                  hang FUNCTION
 *   value INDEX NAME NUMBER                     a reading: one of NAMES; a GPU without it doesn't support the query
 *
 * The file is read at nvmlInit, and when the GPUs are counted. Lines below a line ``then`` apply from the second count
 * of a process on. Return codes and structures are those of nvml.h. */
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

enum { MOST = 64, OK = 0, INVALID = 2, NOT_SUPPORTED = 3, NOT_FOUND = 6, TOO_SMALL = 7, NOT_LOADED = 9, LOST = 15 };

enum { UTILISATION, MEMORY, POWER, POWER_LIMIT, SM_CLOCK, MEMORY_CLOCK, REASONS, CORRECTED, UNCORRECTED, REMAP_PENDING,
       REMAP_FAILED, REPLAYS, NVLINK, VALUES };
static const char *NAMES[VALUES] = {"utilisation", "memory", "power", "power_limit", "sm_clock", "memory_clock",
    "reasons", "corrected", "uncorrected", "remap_pending", "remap_failed", "replays", "nvlink"};

struct device {
    long long value[VALUES]; /* -1: not supported */
    int index, instance, is_mig, migs;
    char uuid[96];
    unsigned long long used, total;
    int processes;
    struct { unsigned pid; unsigned long long bytes; } process[MOST];
};
struct rule { char function[64]; int code, index; };

static struct device gpus[MOST], migs[MOST][8];
static int count;
static struct rule fails[MOST], hangs[MOST];
static int fail_count, hang_count, counted;

static int enter(const char *function, int index) {
    for (int i = 0; i < hang_count; i++)
        if (!strcmp(hangs[i].function, function))
            for (;;) pause();
    for (int i = 0; i < fail_count; i++)
        if (!strcmp(fails[i].function, function) && (fails[i].index < 0 || fails[i].index == index)) return fails[i].code;
    return OK;
}
#define ENTER(index) do { int code_ = enter(__func__, index); if (code_) return code_; } while (0)

static void add_process(struct device *device, unsigned pid, unsigned long long bytes) {
    if (device->processes == MOST) return;
    device->process[device->processes].pid = pid;
    device->process[device->processes++].bytes = bytes;
}

static void read_state(void) {
    const char *path = getenv("NVML_STUB_STATE");
    FILE *file = path ? fopen(path, "r") : NULL;
    char line[512], word[96];
    count = fail_count = hang_count = 0;
    memset(gpus, 0, sizeof gpus), memset(migs, 0, sizeof migs);
    while (file && fgets(line, sizeof line, file)) {
        int a, b, c;
        unsigned long long used, total;
        if (!strcmp(line, "then\n") && counted < 2) break;
        if (sscanf(line, "gpu %d %95s %llu %llu", &a, word, &used, &total) == 4 && a >= 0 && a < MOST) {
            gpus[a].index = a, gpus[a].used = used, gpus[a].total = total;
            strcpy(gpus[a].uuid, word);
            memset(gpus[a].value, -1, sizeof gpus[a].value);
            gpus[a].value[POWER] = 70500, gpus[a].value[MEMORY] = 0;
            if (a >= count) count = a + 1;
        } else if (sscanf(line, "mig %d %d %95s %llu %llu", &a, &b, word, &used, &total) == 5 && a < MOST && b < 8) {
            struct device *mig = &migs[a][b];
            mig->index = a, mig->instance = b, mig->is_mig = 1, mig->used = used, mig->total = total;
            strcpy(mig->uuid, word);
            memset(mig->value, -1, sizeof mig->value);
            gpus[a].migs = 1;
        } else if (sscanf(line, "process %d %d %llu", &a, &b, &used) == 3) add_process(&gpus[a], b, used);
        else if (sscanf(line, "migprocess %d %d %d %llu", &a, &b, &c, &used) == 4) add_process(&migs[a][b], c, used);
        else if (sscanf(line, "value %d %95s %llu", &a, word, &used) == 3 && a >= 0 && a < MOST) {
            for (int i = 0; i < VALUES; i++)
                if (!strcmp(NAMES[i], word)) gpus[a].value[i] = used;
        } else if (sscanf(line, "hang %63s", word) == 1) strcpy(hangs[hang_count++].function, word);
        else {
            int found = sscanf(line, "fail %63s %d %d", word, &a, &b);
            if (found < 2) continue;
            strcpy(fails[fail_count].function, word);
            fails[fail_count].code = a, fails[fail_count++].index = found == 3 ? b : -1;
        }
    }
    if (file) fclose(file);
}

int nvmlInitWithFlags(unsigned flags) { (void)flags; read_state(); ENTER(-1); return OK; }
int nvmlInit_v2(void) { return nvmlInitWithFlags(0); }
int nvmlInit(void) { return nvmlInitWithFlags(0); }
int nvmlShutdown(void) { ENTER(-1); return OK; }

const char *nvmlErrorString(int code) {
    switch (code) {
    case NOT_SUPPORTED: return "Not Supported";
    case NOT_LOADED: return "Driver Not Loaded";
    case LOST: return "GPU is lost";
    default: return "an error of the stub";
    }
}
int nvmlSystemGetDriverVersion(char *text, unsigned size) { ENTER(-1); snprintf(text, size, "999.99"); return OK; }
int nvmlSystemGetCudaDriverVersion(int *version) { ENTER(-1); *version = 12080; return OK; }
int nvmlSystemGetCudaDriverVersion_v2(int *version) { return nvmlSystemGetCudaDriverVersion(version); }

int nvmlDeviceGetCount_v2(unsigned *found) { counted++, read_state(); ENTER(-1); *found = count; return OK; }
int nvmlDeviceGetHandleByIndex_v2(unsigned index, struct device **device) {
    if ((int)index >= count) return INVALID;
    ENTER((int)index);
    *device = &gpus[index];
    return OK;
}
int nvmlDeviceGetUUID(struct device *device, char *text, unsigned size) {
    ENTER(device->index);
    snprintf(text, size, "%s", device->uuid);
    return OK;
}
int nvmlDeviceGetName(struct device *device, char *text, unsigned size) {
    ENTER(device->index);
    snprintf(text, size, device->is_mig ? "NVIDIA H100 80GB HBM3 MIG 1g.10gb" : "NVIDIA H100 80GB HBM3");
    return OK;
}
int nvmlDeviceGetMemoryInfo(struct device *device, unsigned long long memory[3]) { /* counts the driver's own as used */
    ENTER(device->index);
    memory[0] = device->total, memory[2] = device->used + (600ull << 20), memory[1] = memory[0] - memory[2];
    return OK;
}
struct memory_v2 { unsigned version; unsigned long long total, reserved, free, used; };
int nvmlDeviceGetMemoryInfo_v2(struct device *device, struct memory_v2 *memory) {
    ENTER(device->index);
    memory->total = device->total, memory->reserved = 600ull << 20, memory->used = device->used;
    memory->free = device->total - device->used;
    return OK;
}
struct process { unsigned pid; unsigned long long bytes; unsigned gpu_instance, compute_instance; };
int nvmlDeviceGetComputeRunningProcesses_v3(struct device *device, unsigned *size, struct process *list) {
    ENTER(device->index);
    int there = device->processes, room = list ? (int)*size : 0;
    *size = there;
    if (!there) return OK;
    if (room < there) return TOO_SMALL;
    for (int i = 0; i < there; i++)
        list[i] = (struct process){device->process[i].pid, device->process[i].bytes, 0, 0};
    return OK;
}
int nvmlDeviceGetUtilizationRates(struct device *device, unsigned rates[2]) {
    ENTER(device->index);
    if (device->is_mig || device->migs) return NOT_SUPPORTED;
    rates[0] = device->value[UTILISATION] >= 0 ? device->value[UTILISATION] : device->processes ? 97 : 0;
    rates[1] = device->value[MEMORY];
    return OK;
}
#define ANSWER(name, result) do { \
    ENTER(device->index); \
    if (device->value[name] < 0) return NOT_SUPPORTED; \
    *(result) = device->value[name]; \
    return OK; } while (0)
int nvmlDeviceGetPowerUsage(struct device *device, unsigned *milliwatts) { ANSWER(POWER, milliwatts); }
int nvmlDeviceGetEnforcedPowerLimit(struct device *device, unsigned *milliwatts) { ANSWER(POWER_LIMIT, milliwatts); }
int nvmlDeviceGetCurrentClocksEventReasons(struct device *device, unsigned long long *bits) { ANSWER(REASONS, bits); }
int nvmlDeviceGetPcieReplayCounter(struct device *device, unsigned *count) { ANSWER(REPLAYS, count); }
int nvmlDeviceGetClockInfo(struct device *device, int type, unsigned *mhz) {
    ANSWER(type == 2 ? MEMORY_CLOCK : SM_CLOCK, mhz);
}
int nvmlDeviceGetTotalEccErrors(struct device *device, int type, int counter, unsigned long long *count) {
    (void)counter;
    ANSWER(type == 0 ? CORRECTED : UNCORRECTED, count);
}
int nvmlDeviceGetRemappedRows(
    struct device *device, unsigned *corrected, unsigned *uncorrected, unsigned *pending, unsigned *failed) {
    *corrected = *uncorrected = 0;
    *pending = device->value[REMAP_PENDING] > 0;
    ANSWER(REMAP_FAILED, failed);
}
struct field { unsigned id, scope; long long timestamp, latency; int type, code; unsigned long long value; };
int nvmlDeviceGetFieldValues(struct device *device, int size, struct field *fields) { /* one counter of each link */
    ENTER(device->index);
    for (int i = 0; i < size; i++) {
        fields[i].code = device->value[NVLINK] < 0 || i ? NOT_SUPPORTED : OK;
        if (!fields[i].code) fields[i].type = 3, fields[i].value = device->value[NVLINK];
    }
    return OK;
}
int nvmlDeviceGetMigMode(struct device *device, unsigned *current, unsigned *pending) {
    ENTER(device->index);
    *current = *pending = device->migs;
    return OK;
}
int nvmlDeviceGetMaxMigDeviceCount(struct device *device, unsigned *most) {
    ENTER(device->index);
    *most = device->migs ? 7 : 0;
    return OK;
}
int nvmlDeviceGetMigDeviceHandleByIndex(struct device *device, unsigned index, struct device **mig) {
    ENTER(device->index);
    if (index >= 8 || !migs[device->index][index].is_mig) return NOT_FOUND;
    *mig = &migs[device->index][index];
    return OK;
}
