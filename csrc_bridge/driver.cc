#include "driver.h"

#include <dlfcn.h>

#include <cstring>

namespace jax_dsa {
namespace {

constexpr const char kLibrary[] = "libcuda.so.1";

std::string VersionText(int version) { return Text(version / 1000, ".", version % 1000 / 10); }

// The object and function pointers of dlsym and cuGetProcAddress have one representation.
template <typename Function>
void Assign(Function& slot, void* address) {
  static_assert(sizeof(slot) == sizeof(address));
  std::memcpy(&slot, &address, sizeof(slot));
}

class Opened {
 public:
  Opened() : handle_(dlopen(kLibrary, RTLD_NOW | RTLD_LOCAL)) {
    if (handle_ == nullptr) {
      const char* cause = dlerror();
      Fail(ErrorKind::kFailedPrecondition,
           "the CUDA driver cannot be opened: ", cause ? cause : kLibrary,
           "; install the NVIDIA driver (525 or newer)");
    }
    Assign(address_of_, dlsym(handle_, "cuGetProcAddress_v2"));
    Assign(version_of_, dlsym(handle_, "cuDriverGetVersion"));
  }

  void* Find(const char* name, int version) const {
    void* found = nullptr;
    CUdriverProcAddressQueryResult status = CU_GET_PROC_ADDRESS_SUCCESS;
    if (address_of_ != nullptr) {
      const CUresult result =
          address_of_(name, &found, version, CU_GET_PROC_ADDRESS_DEFAULT, &status);
      if (result != CUDA_SUCCESS) found = nullptr;
    }
    if (found == nullptr) {
      int present = 0;
      if (version_of_ != nullptr) version_of_(&present);
      Fail(ErrorKind::kFailedPrecondition, "the CUDA driver is too old: it has no ", name,
           " of CUDA ", VersionText(version), "; it serves CUDA ", VersionText(present),
           ", wanted is 12.0 or newer: update the NVIDIA driver");
    }
    return found;
  }

 private:
  void* handle_;  // never closed: functions stay in use until the process ends
  PFN_cuGetProcAddress_v12000 address_of_ = nullptr;
  PFN_cuDriverGetVersion_v2020 version_of_ = nullptr;
};

Driver OpenDriver() {
  const Opened library;
  Driver driver;
#define JAX_DSA_FIND(name, version) Assign(driver.name, library.Find(#name, version));
  JAX_DSA_REQUIRED_FUNCTIONS(JAX_DSA_FIND)
  JAX_DSA_DEVICE_FUNCTIONS(JAX_DSA_FIND)
#undef JAX_DSA_FIND
  JAX_DSA_CALL(driver, [] { return std::string("starting the CUDA driver"); }, cuInit, 0);
  return driver;
}

}  // namespace

void FailCall(const Driver& driver, CUresult result, const char* expression,
              const std::string& who) {
  const char* name = nullptr;
  const char* words = nullptr;
  if (driver.cuGetErrorName(result, &name) != CUDA_SUCCESS || name == nullptr) name = "an error";
  if (driver.cuGetErrorString(result, &words) != CUDA_SUCCESS || words == nullptr) words = "?";
  const ErrorKind kind =
      result == CUDA_ERROR_OUT_OF_MEMORY ? ErrorKind::kOutOfMemory : ErrorKind::kInternal;
  Fail(kind, who, ": ", expression, " failed with ", name, " (", static_cast<int>(result), ": ",
       words, ")");
}

const Driver& CudaDriver() {
  static const Driver driver = OpenDriver();  // a failure is tried again by the next call
  return driver;
}

Driver MakeDriver(const char* const* names, void* const* functions, int count) {
  Driver driver;
  for (int i = 0; i < count; ++i) {
    bool known = false;
#define JAX_DSA_TAKE(name, version)        \
  if (std::strcmp(names[i], #name) == 0) { \
    Assign(driver.name, functions[i]);     \
    known = true;                          \
  }
    JAX_DSA_REQUIRED_FUNCTIONS(JAX_DSA_TAKE)
    JAX_DSA_DEVICE_FUNCTIONS(JAX_DSA_TAKE)
#undef JAX_DSA_TAKE
    if (!known) {
      Fail(ErrorKind::kInvalidArgument, "driver table: got function '", names[i], "', want one of ",
           DriverFunctionNames());
    }
  }
#define JAX_DSA_WANT(name, version) \
  if (driver.name == nullptr)       \
    Fail(ErrorKind::kInvalidArgument, "driver table: function '", #name, "' is missing");
  JAX_DSA_REQUIRED_FUNCTIONS(JAX_DSA_WANT)
#undef JAX_DSA_WANT
  return driver;
}

const char* DriverFunctionNames() {
#define JAX_DSA_NAME(name, version) #name " "
  return JAX_DSA_REQUIRED_FUNCTIONS(JAX_DSA_NAME) "| " JAX_DSA_DEVICE_FUNCTIONS(JAX_DSA_NAME);
#undef JAX_DSA_NAME
}

DriverInfo QueryDriver(const Driver& driver) {
  const auto who = [] { return std::string("asking the CUDA driver"); };
  DriverInfo info;
  JAX_DSA_CALL(driver, who, cuDriverGetVersion, &info.version);
  JAX_DSA_CALL(driver, who, cuDeviceGetCount, &info.devices);
  return info;
}

Capability DeviceCapability(const Driver& driver, CUdevice device) {
  const auto who = [device] {
    return Text("asking for the compute capability of device ", device);
  };
  Capability found;
  JAX_DSA_CALL(driver, who, cuDeviceGetAttribute, &found.major,
               CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR, device);
  JAX_DSA_CALL(driver, who, cuDeviceGetAttribute, &found.minor,
               CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MINOR, device);
  return found;
}

}  // namespace jax_dsa
