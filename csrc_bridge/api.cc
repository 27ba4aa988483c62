// The plain C interface.

#include <cstdio>
#include <exception>
#include <utility>
#include <vector>

#include "bridge.h"
#include "driver.h"
#include "launch.h"
#include "registry.h"
#include "xla/ffi/api/c_api.h"

namespace {

using namespace jax_dsa;

// Runs `action`; an exception becomes -1 and its text.
template <typename Action>
int32_t Guard(char* error, size_t error_size, Action action) {
  try {
    action();
    return 0;
  } catch (const std::exception& failure) {
    if (error != nullptr && error_size > 0) {
      std::snprintf(error, error_size, "%s", failure.what());
    }
    return -1;
  }
}

}  // namespace

extern "C" {

int32_t jax_dsa_bridge_version(void) { return JAX_DSA_BRIDGE_VERSION; }

int32_t jax_dsa_ffi_api_minor(void) { return XLA_FFI_API_MINOR; }

int32_t jax_dsa_install_kernels(const JaxDsaKernel* kernels, int32_t count, char* error,
                                size_t error_size) {
  return Guard(error, error_size, [&] {
    std::vector<Kernel> parsed;
    for (int32_t i = 0; i < count; ++i) parsed.push_back(ParseKernel(kernels[i]));
    Registry::Get().Install(std::move(parsed));
  });
}

const char* jax_dsa_driver_functions(void) { return DriverFunctionNames(); }

int32_t jax_dsa_install_driver(const char* const* names, void* const* functions, int32_t count,
                               char* error, size_t error_size) {
  return Guard(error, error_size, [&] {
    std::optional<Driver> driver;
    if (count > 0) driver = MakeDriver(names, functions, count);
    Registry::Get().InstallDriver(driver);
  });
}

int32_t jax_dsa_query_driver(int32_t* version, int32_t* capabilities, int32_t capacity,
                             int32_t* count, char* error, size_t error_size) {
  return Guard(error, error_size, [&] {
    const Driver& driver = CudaDriver();
    const DriverInfo info = QueryDriver(driver);
    for (int i = 0; i < info.devices && i < capacity; ++i) {
      CUdevice device = 0;
      JAX_DSA_CALL(driver, [i] { return Text("asking for device ", i); }, cuDeviceGet, &device, i);
      const Capability found = DeviceCapability(driver, device);
      capabilities[i] = 10 * found.major + found.minor;
    }
    *version = info.version;
    *count = info.devices;
  });
}

int64_t jax_dsa_launch_count(void) { return LaunchCount(); }

void jax_dsa_reset(void) { Registry::Get().Reset(); }

}  // extern "C"
