/* A CUDA driver of a few calls, told by environment variables what to be:
   FAKE_CUDA_DEVICES  how many devices it has (1)
   FAKE_CUDA_FAIL     the function that fails, with error 999
   FAKE_CUDA_GATE     a file; a context is not made before it exists */
#include <stddef.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

static int retained;

static int failing(const char *name)
{
    const char *failing = getenv("FAKE_CUDA_FAIL");
    return failing && !strcmp(failing, name) ? 999 : 0;
}

int cuInit(unsigned flags) { return flags ? 1 : failing("cuInit"); }
int cuGetErrorString(int error, const char **text) { *text = error == 999 ? "unknown error" : "other"; return 0; }
int cuDriverGetVersion(int *version) { *version = 13000; return 0; }
int cuDeviceGetCount(int *count)
{
    const char *devices = getenv("FAKE_CUDA_DEVICES");
    *count = devices ? atoi(devices) : 1;
    return failing("cuDeviceGetCount");
}
int cuDeviceGet(int *device, int ordinal) { *device = ordinal + 40; return failing("cuDeviceGet"); }
int cuDeviceGetName(char *name, int size, int device) { snprintf(name, size, "Fake %d", device); return 0; }
int cuDeviceGetAttribute(int *value, int attribute, int device) { *value = attribute == 75 ? 9 : 0; return device != 40; }
int cuDeviceTotalMem_v2(size_t *bytes, int device) { *bytes = 1ull << 37; return device != 40; }
int cuDevicePrimaryCtxRetain(void **context, int device)
{
    const char *gate = getenv("FAKE_CUDA_GATE");
    for (int i = 0; gate && access(gate, F_OK); i++) {
        if (i == 60000) return 999;
        usleep(1000);
    }
    *context = (void *)0x1234;
    retained++;
    return device == 40 ? failing("cuDevicePrimaryCtxRetain") : 101;
}
int cuDevicePrimaryCtxRelease_v2(int device) { retained--; return device == 40 ? 0 : 101; }
int fake_retained(void) { return retained; }
