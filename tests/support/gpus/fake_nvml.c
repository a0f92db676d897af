/* NVIDIA's management library of a few calls, told by environment variables what to be:
   FAKE_GPUS  a line for each GPU: name,UUID,MB in all,MB free,generation of PCIe,lanes; 0 MB: not supported. A UUID "error N"
              fails with N. Lines whose UUID begins with MIG- are the parts of the GPU before them, or with MIG-0 of none;
              with MIG-lost, it is lost when its memory is asked for
   FAKE_NVML  the function that fails, with error 999 */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

struct gpu { char name[64], uuid[64]; unsigned long long total, free; unsigned generation, lanes; };
static struct gpu found;

static int failing(const char *name)
{
    const char *failing = getenv("FAKE_NVML");
    return failing && !strcmp(failing, name) ? 999 : 0;
}

/* Read a line into `found`; returns the number of lines if there is no such line. */
static int read_gpu(int number)
{
    const char *line = getenv("FAKE_GPUS");
    int lines = 0;
    for (; line && *line; lines++) {
        if (lines == number &&
            sscanf(line, "%63[^,],%63[^,],%llu,%llu,%u,%u", found.name, found.uuid, &found.total, &found.free,
                   &found.generation, &found.lanes) == 6)
            return -1;
        line = strchr(line, '\n');
        line = line ? line + 1 : 0;
    }
    return lines;
}

static int opened; /* calls between init and shutdown, and no others, are allowed */

int nvmlInit_v2(void) { return failing("nvmlInit_v2") ? 999 : !++opened; }
int nvmlShutdown(void) { return opened-- > 0 ? 0 : 1; }
int fake_opened(void) { return opened; }
static int is_part(void) { return !strncmp(found.uuid, "MIG-", 4); }

/* Return the line of the GPU of this number, or with `parent` >= 0 of this part of the GPU in that line; -1: there is none. */
static int line_of(int number, int parent)
{
    for (int line = parent + 1; read_gpu(line) < 0; line++) {
        if (is_part() != (parent >= 0))
            if (parent >= 0)
                break;
            else
                continue;
        else if (!number--)
            return line;
    }
    return -1;
}
int nvmlDeviceGetCount_v2(unsigned *count)
{
    for (*count = 0; line_of(*count, -1) >= 0; ++*count)
        ;
    return opened > 0 ? failing("nvmlDeviceGetCount_v2") : 1;
}
int nvmlDeviceGetHandleByIndex_v2(unsigned index, void **device)
{
    int line = line_of(index, -1), code;
    *device = (void *)(size_t)(line + 1);
    if (line >= 0 && sscanf(found.uuid, "error %d", &code) == 1)
        return code;
    return line >= 0 ? failing("nvmlDeviceGetHandleByIndex_v2") : 2;
}
int nvmlDeviceGetMigMode(void *device, unsigned *now, unsigned *pending)
{
    read_gpu((size_t)device - 1);
    *now = *pending = read_gpu((size_t)device) < 0 && is_part();
    return failing("nvmlDeviceGetMigMode");
}
int nvmlDeviceGetMaxMigDeviceCount(void *device, unsigned *count) { *count = 7; return 0; }
int nvmlDeviceGetMigDeviceHandleByIndex(void *device, unsigned index, void **part)
{
    int line = index ? line_of(index - 1, (int)(size_t)device - 1) : -1; /* the first is in no use */
    *part = (void *)(size_t)(line + 1);
    return line < 0 || !strcmp(found.uuid, "MIG-0") ? 6 : 0;
}
static int copy(const char *from, char *text, unsigned size) { snprintf(text, size, "%s", from); return 0; }
int nvmlDeviceGetName(void *device, char *text, unsigned size) { read_gpu((size_t)device - 1); return copy(found.name, text, size); }
int nvmlDeviceGetUUID(void *device, char *text, unsigned size) { read_gpu((size_t)device - 1); return copy(found.uuid, text, size); }
int nvmlDeviceGetMemoryInfo(void *device, unsigned long long sizes[3])
{
    read_gpu((size_t)device - 1);
    sizes[0] = found.total * 1000000;
    sizes[1] = found.free * 1000000;
    return !strcmp(found.uuid, "MIG-lost") ? 15 : found.total ? failing("nvmlDeviceGetMemoryInfo") : 3;
}
int nvmlDeviceGetMaxPcieLinkGeneration(void *device, unsigned *value) { read_gpu((size_t)device - 1); *value = found.generation; return 0; }
int nvmlDeviceGetMaxPcieLinkWidth(void *device, unsigned *value) { read_gpu((size_t)device - 1); *value = found.lanes; return 0; }
