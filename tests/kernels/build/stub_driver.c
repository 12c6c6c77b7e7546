/* A CUDA driver that launches nothing: it prints what it is told, one line a call. Built by
 * test_stub_driver.py as libcuda.so.1, so that the real cuda-python runs on a machine without a GPU.
 * Structures as in cuda.h of CUDA 12 and 13. */
#include <stdint.h>
#include <stdio.h>
#include <string.h>

typedef struct {
    int id;
    char pad[4];
    int value[16];
} attribute_t;

typedef struct {
    unsigned grid[3], block[3], shared;
    void *stream;
    attribute_t *attributes;
    unsigned count;
} config_t;

static int launches;

static int unsupported(void) { return 801; } /* CUDA_ERROR_NOT_SUPPORTED */
static int cuInit(unsigned flags) { return 0; }
static int cuDriverGetVersion(int *version) { *version = 13000; return 0; }
static int cuDeviceGet(int *device, int ordinal) { *device = ordinal; return 0; }
static int cuDeviceGetAttribute(int *value, int attribute, int device) {
    *value = attribute == 75 ? 9 : 0; /* compute capability 9.0 */
    return 0;
}
static int cuCtxGetCurrent(void **context) { *context = 0; return 0; }
static int cuDevicePrimaryCtxRetain(void **context, int device) { *context = (void *)0x55; return 0; }
static int cuCtxSetCurrent(void *context) { printf("context %p\n", context); return 0; }
static int cuLibraryLoadData(void **library, const void *code, void *a, void *b, unsigned c, void *d,
                             void *e, unsigned f) {
    printf("load %.3s %u %u\n", (const char *)code + 1, c, f);
    *library = (void *)0x11;
    return 0;
}
static int cuLibraryGetKernel(void **kernel, void *library, const char *name) {
    printf("kernel %p %s\n", library, name);
    *kernel = (void *)0x22;
    return 0;
}
static int cuKernelGetFunction(void **function, void *kernel) {
    printf("function %p\n", kernel);
    *function = (void *)0x33;
    return 0;
}
static int cuFuncSetAttribute(void *function, int attribute, int value) {
    printf("set %p %d %d\n", function, attribute, value);
    return 0;
}
static int cuTensorMapEncodeTiled(uint64_t *map, int type, unsigned rank, void *address,
                                  const uint64_t *dims, const uint64_t *strides, const unsigned *box,
                                  const unsigned *steps, int interleave, int swizzle, int promotion,
                                  int fill) {
    printf("map type %d rank %u address %p aligned %d modes %d %d %d %d\n", type, rank, address,
           (uintptr_t)map % 64 == 0, interleave, swizzle, promotion, fill);
    for (unsigned i = 0; i < rank; i++)
        printf("dimension %lu %lu %u %u\n", dims[i], i ? strides[i - 1] : 0, box[i], steps[i]);
    for (int i = 0; i < 16; i++) map[i] = 0xa0 + i;
    return 0;
}
static int cuLaunchKernelEx(const config_t *c, void *function, void **parameters, void **extra) {
    if (launches++ >= 4) return 0; /* a loop that measures time prints nothing */
    printf("launch %p grid %u %u %u block %u %u %u shared %u stream %p extra %d\n", function,
           c->grid[0], c->grid[1], c->grid[2], c->block[0], c->block[1], c->block[2], c->shared,
           c->stream, extra != 0);
    for (unsigned i = 0; i < c->count; i++)
        printf("attribute %d %d %d %d\n", c->attributes[i].id, c->attributes[i].value[0],
               c->attributes[i].value[1], c->attributes[i].value[2]);
    for (int i = 0; i < 3; i++) printf("parameter %016lx\n", *(uint64_t *)parameters[i]);
    return 0;
}

#define OFFER(name) \
    if (!strcmp(symbol, #name)) { *address = (void *)name; return 0; }

int cuGetProcAddress_v2(const char *symbol, void **address, int version, uint64_t flags, int *status) {
    if (status) *status = 0;
    OFFER(cuInit) OFFER(cuDriverGetVersion) OFFER(cuDeviceGet) OFFER(cuDeviceGetAttribute)
    OFFER(cuCtxGetCurrent) OFFER(cuDevicePrimaryCtxRetain) OFFER(cuCtxSetCurrent)
    OFFER(cuLibraryLoadData) OFFER(cuLibraryGetKernel) OFFER(cuKernelGetFunction)
    OFFER(cuFuncSetAttribute) OFFER(cuLaunchKernelEx) OFFER(cuTensorMapEncodeTiled)
    *address = !strcmp(symbol, "cuGetProcAddress") ? (void *)cuGetProcAddress_v2 : (void *)unsupported;
    return 0;
}
int cuGetProcAddress(const char *symbol, void **address, int version, uint64_t flags) {
    return cuGetProcAddress_v2(symbol, address, version, flags, 0);
}
