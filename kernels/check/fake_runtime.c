/* Stands in for the CUDA runtime below the host code that CuTe DSL compiles, so that this code runs
 * on a machine without a GPU: nothing is loaded and nothing starts, and every launch is handed to a
 * callback with all that the host code filled in. The DSL looks these names up in the library that
 * CUTE_DSL_LIBS names; they are those that host code of DSL 4.8.1 refers to. */
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

/* cudaLaunchConfig_t; an attribute is 72 bytes: a 4-byte id, 4 bytes of padding, 64 of value. */
struct launch {
    uint32_t grid[3];
    uint32_t block[3];
    uint64_t dynamic_smem;
    void *stream;
    const unsigned char *attributes;
    uint32_t attribute_count;
};

typedef int (*launch_callback)(const char *kernel, const struct launch *launch, void **parameters);
typedef void (*setting_callback)(const char *kernel, int attribute, int value);

static launch_callback launched;
static setting_callback set;

void k3fuse_on_launch(launch_callback callback) { launched = callback; }
void k3fuse_on_setting(setting_callback callback) { set = callback; }

/* A kernel's handle is its name. */
int _cudaLibraryGetKernel(void **kernel, void *library, const char *name) {
    (void)library;
    *kernel = strdup(name);
    return *kernel == NULL ? 2 : 0; /* cudaErrorMemoryAllocation */
}

int _cudaLaunchKernelEx(const struct launch *launch, void *kernel, void **parameters) {
    return launched == NULL ? 0 : launched((const char *)kernel, launch, parameters);
}

int _cudaLaunchKernel(void *kernel, uint32_t gx, uint32_t gy, uint32_t gz, uint32_t bx, uint32_t by,
                      uint32_t bz, void **parameters, uint64_t dynamic_smem, void *stream) {
    struct launch launch = {{gx, gy, gz}, {bx, by, bz}, dynamic_smem, stream, NULL, 0};
    return _cudaLaunchKernelEx(&launch, kernel, parameters);
}

int _cudaKernelSetAttributeForDevice(void *kernel, int attribute, int value, int device) {
    (void)device;
    if (set != NULL)
        set((const char *)kernel, attribute, value);
    return 0;
}

int _cudaFuncSetAttribute(void *kernel, int attribute, int value) {
    return _cudaKernelSetAttributeForDevice(kernel, attribute, value, 0);
}

int _cudaLibraryLoadData(void **library, const void *image, void *a, void *b, uint32_t c, void *d,
                         void *e, uint32_t f) {
    (void)a, (void)b, (void)c, (void)d, (void)e, (void)f;
    *library = (void *)image;
    return 0;
}

int _cudaLibraryUnload(void *library) {
    (void)library;
    return 0;
}

/* One device, which allows as much as sm_90 and later do. */
int _cudaGetDeviceCount(int *count) {
    *count = 1;
    return 0;
}

int _cudaGetDevice(int *device) {
    *device = 0;
    return 0;
}

int _cudaSetDevice(int device) { return device == 0 ? 0 : 101; /* cudaErrorInvalidDevice */ }

int _cudaDeviceGetAttribute(int *value, int attribute, int device) {
    (void)device;
    /* cudaDevAttrMaxSharedMemoryPerBlockOptin: 227 KiB */
    *value = attribute == 97 ? 227 * 1024 : 0;
    return 0;
}

int _cuKernelGetAttribute(int *value, int attribute, void *kernel, int device) {
    (void)kernel, (void)device;
    /* CU_FUNC_ATTRIBUTE_SHARED_SIZE_BYTES: what the system reserves */
    *value = attribute == 1 ? 1024 : 0;
    return 0;
}

int _cudaOccupancyMaxActiveBlocksPerMultiprocessor(int *count, void *kernel, int block,
                                                   uint64_t dynamic_smem) {
    (void)kernel, (void)block, (void)dynamic_smem;
    *count = 1;
    return 0;
}
