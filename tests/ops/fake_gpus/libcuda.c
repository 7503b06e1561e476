/* CUDA's driver for two GPUs, of compute capabilities 9.0 and 8.0, that run nothing and record launches.

   A launch fails, as on hardware, if its function was loaded on another GPU than the current one, or if its stream
   belongs to another GPU: the last digit of a stream is the number of its GPU. */
#include <cuda.h>

typedef struct {
  int device;
  unsigned grid[3];
  unsigned long long stream, pointers[8];
  int numbers[8];
} Launch;

int num_pointers, num_numbers; /* of the parameters of the next launches, in this order */
int num_launches;
Launch launches[64]; /* the last ones */

static int gpus[2] = {0, 1};
static _Thread_local int* current;

CUresult cuInit(unsigned flags) { return CUDA_SUCCESS; }
CUresult cuDriverGetVersion(int* version) { return *version = 12080, CUDA_SUCCESS; }
CUresult cuGetErrorString(CUresult error, const char** text) { return *text = "refused", CUDA_SUCCESS; }

CUresult cuDeviceGetCount(int* count) { return *count = 2, CUDA_SUCCESS; }
CUresult cuDeviceGet(CUdevice* device, int index) { return *device = index, CUDA_SUCCESS; }
CUresult cuDeviceGetAttribute(int* value, CUdevice_attribute attribute, CUdevice device) {
  switch (attribute) {
    case CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR: *value = 9 - device; break;
    case CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MINOR: *value = 0; break;
    case CU_DEVICE_ATTRIBUTE_WARP_SIZE: *value = 32; break;
    case CU_DEVICE_ATTRIBUTE_MAX_REGISTERS_PER_BLOCK: *value = 65536; break;
    default: *value = 227 << 10; /* bytes of shared memory */
  }
  return CUDA_SUCCESS;
}

CUresult cuDevicePrimaryCtxRetain(CUcontext* context, CUdevice device) {
  return *context = (CUcontext)&gpus[device], CUDA_SUCCESS;
}
CUresult cuCtxGetCurrent(CUcontext* context) { return *context = (CUcontext)current, CUDA_SUCCESS; }
CUresult cuCtxSetCurrent(CUcontext context) { return current = (int*)context, CUDA_SUCCESS; }
CUresult cuCtxGetDevice(CUdevice* device) {
  return current ? (*device = *current, CUDA_SUCCESS) : CUDA_ERROR_INVALID_CONTEXT;
}
CUresult cuCtxGetLimit(size_t* value, CUlimit limit) { return CUDA_SUCCESS; }
CUresult cuCtxSetLimit(CUlimit limit, size_t value) { return CUDA_SUCCESS; }

CUresult cuModuleLoadData(CUmodule* module, const void* image) { return *module = (CUmodule)current, CUDA_SUCCESS; }
CUresult cuModuleUnload(CUmodule module) { return CUDA_SUCCESS; }
CUresult cuModuleGetFunction(CUfunction* function, CUmodule module, const char* name) {
  return *function = (CUfunction)module, CUDA_SUCCESS;
}
CUresult cuFuncGetAttribute(int* value, CUfunction_attribute attribute, CUfunction function) {
  return *value = attribute == CU_FUNC_ATTRIBUTE_MAX_THREADS_PER_BLOCK ? 1024 : 0, CUDA_SUCCESS;
}
CUresult cuFuncSetAttribute(CUfunction function, CUfunction_attribute attribute, int value) { return CUDA_SUCCESS; }
CUresult cuFuncSetCacheConfig(CUfunction function, CUfunc_cache config) { return CUDA_SUCCESS; }
CUresult cuPointerGetAttribute(void* value, CUpointer_attribute attribute, CUdeviceptr pointer) {
  return *(CUdeviceptr*)value = pointer, CUDA_SUCCESS;
}
CUresult cuStreamIsCapturing(CUstream stream, CUstreamCaptureStatus* status) {
  return *status = CU_STREAM_CAPTURE_STATUS_NONE, CUDA_SUCCESS;
}

CUresult cuLaunchKernelEx(const CUlaunchConfig* config, CUfunction function, void** parameters, void** extra) {
  unsigned long long stream = (unsigned long long)config->hStream;
  if ((int*)function != current || stream % 10 != *current) return CUDA_ERROR_INVALID_HANDLE;
  Launch* launch = &launches[num_launches++ % 64];
  *launch = (Launch){*current, {config->gridDimX, config->gridDimY, config->gridDimZ}, stream};
  for (int i = 0; i < num_pointers; ++i) launch->pointers[i] = *(unsigned long long*)parameters[i];
  for (int i = 0; i < num_numbers; ++i) launch->numbers[i] = *(int*)parameters[num_pointers + i];
  return CUDA_SUCCESS;
}
