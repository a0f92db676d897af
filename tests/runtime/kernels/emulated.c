/* Calls one function of the kernels' library by qemu: emulated LIBRARY BITS BF16,BYTES IMAGE ADDRESS SIZE NAME FLOAT FLOAT INTEGER…
 * The image is the memory that its pointers lead to; it is mapped where they expect it, and holds the results afterwards. */
#include <dlfcn.h>
#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <sys/mman.h>

typedef int (*function)(long, long, long, long, long, long, long, long, long, long, long, long, long, float, float);

int main(int count, char **arguments)
{
    long a[13] = {0};
    void *library = dlopen(arguments[1], RTLD_NOW);
    if (!library) {
        fprintf(stderr, "%s\n", dlerror());
        return 2;
    }
    int bf16 = 0, bytes = 0;
    if (sscanf(arguments[3], "%d,%d", &bf16, &bytes) != 2)
        return 2;
    ((void (*)(int, int, int))dlsym(library, "medusa_configure"))(atoi(arguments[2]), bf16, bytes);
    const int image = open(arguments[4], O_RDWR);
    void *address = (void *)strtol(arguments[5], NULL, 0);
    if (mmap(address, strtoul(arguments[6], NULL, 0), PROT_READ | PROT_WRITE, MAP_SHARED | MAP_FIXED, image, 0) != address) {
        perror("mmap");
        return 2;
    }
    for (int i = 10; i < count && i < 23; i++)
        a[i - 10] = strtol(arguments[i], NULL, 0);
    function call = (function)dlsym(library, arguments[7]);
    call(a[0], a[1], a[2], a[3], a[4], a[5], a[6], a[7], a[8], a[9], a[10], a[11], a[12], strtof(arguments[8], NULL),
         strtof(arguments[9], NULL));
    return 0;
}
