// The CUDA driver as a table of function pointers: the real one, opened when first used, or one
// that was installed in its place.

#ifndef JAX_DSA_DRIVER_H_
#define JAX_DSA_DRIVER_H_

#include <cuda.h>
#include <cudaTypedefs.h>

#include <string>

#include "error.h"

namespace jax_dsa {

// Name and the CUDA version of the signature. Every table has these ...
#define JAX_DSA_REQUIRED_FUNCTIONS(X) \
  X(cuDeviceGetAttribute, 2000)       \
  X(cuGetErrorName, 6000)             \
  X(cuGetErrorString, 6000)           \
  X(cuKernelGetFunction, 12000)       \
  X(cuKernelSetAttribute, 12000)      \
  X(cuLaunchKernelEx, 11060)          \
  X(cuLibraryGetKernel, 12000)        \
  X(cuLibraryLoadData, 12000)         \
  X(cuLibraryUnload, 12000)           \
  X(cuMemsetD8Async, 3020)            \
  X(cuTensorMapEncodeTiled, 12000)
// ... and the real driver also these, for contexts and queries.
#define JAX_DSA_DEVICE_FUNCTIONS(X) \
  X(cuCtxGetDevice, 2000)           \
  X(cuCtxPopCurrent, 4000)          \
  X(cuCtxPushCurrent, 4000)         \
  X(cuDeviceGet, 2000)              \
  X(cuDeviceGetCount, 2000)         \
  X(cuDriverGetVersion, 2020)       \
  X(cuInit, 2000)                   \
  X(cuStreamGetCtx, 9020)

struct Driver {
#define JAX_DSA_MEMBER(name, version) PFN_##name##_v##version name = nullptr;
  JAX_DSA_REQUIRED_FUNCTIONS(JAX_DSA_MEMBER)
  JAX_DSA_DEVICE_FUNCTIONS(JAX_DSA_MEMBER)
#undef JAX_DSA_MEMBER
};

// Calls a driver function; a failure names the expression, the cause and `who`, which says on
// whose behalf the call was made. `who` is a callable: no text is made while all is well.
#define JAX_DSA_CALL(driver, who, function, ...)                                              \
  do {                                                                                        \
    const CUresult jax_dsa_result = (driver).function(__VA_ARGS__);                           \
    if (jax_dsa_result != CUDA_SUCCESS) {                                                     \
      ::jax_dsa::FailCall((driver), jax_dsa_result, #function "(" #__VA_ARGS__ ")", (who)()); \
    }                                                                                         \
  } while (false)

[[noreturn]] void FailCall(const Driver& driver, CUresult result, const char* expression,
                           const std::string& who);

// The machine's driver, opened once. Throws where it is absent or too old.
const Driver& CudaDriver();

// Fills a table by name from parallel arrays; throws where a required function is missing or a name
// is unknown.
Driver MakeDriver(const char* const* names, void* const* functions, int count);

// See jax_dsa_driver_functions.
const char* DriverFunctionNames();

struct DriverInfo {
  int version = 0;
  int devices = 0;
};
DriverInfo QueryDriver(const Driver& driver);

struct Capability {
  int major = 0;
  int minor = 0;
};
Capability DeviceCapability(const Driver& driver, CUdevice device);

}  // namespace jax_dsa

#endif  // JAX_DSA_DRIVER_H_
