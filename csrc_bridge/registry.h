// The kernels of this process: installed, looked up by what the device is and what is asked,
// loaded once.

#ifndef JAX_DSA_REGISTRY_H_
#define JAX_DSA_REGISTRY_H_

#include <atomic>
#include <deque>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "driver.h"
#include "plan.h"

namespace jax_dsa {

enum class Platform { kCuda, kCpu };

// A loaded image; unloaded when destroyed.
class Library {
 public:
  Library(const Driver& driver, const Kernel& kernel, const std::string& who);
  ~Library();
  Library(const Library&) = delete;
  Library& operator=(const Library&) = delete;

  CUlibrary get() const { return library_; }

 private:
  const Driver driver_;  // a copy: the table may have been replaced when this is unloaded
  CUlibrary library_ = nullptr;
};

// A kernel that is ready to be launched on one device.
struct Ready {
  Platform platform;
  int ordinal;
  Op op;
  Facts facts;
  std::shared_ptr<const Kernel> kernel;
  std::shared_ptr<const Library> library;
  CUfunction function = nullptr;
  Capability capability;
  const Ready* next = nullptr;

  // On whose behalf a driver call is made, for messages.
  std::string Who() const;
};

class Registry {
 public:
  static Registry& Get();

  void Install(std::vector<Kernel> kernels);
  void InstallDriver(std::optional<Driver> driver);
  void Reset();

  const Driver& DriverOf(Platform platform) const;

  // The kernel for a problem, or the reason why there is none. What was found once for a device is
  // found again without a lock. `stream` is null where there are no contexts.
  const Ready& Find(Platform platform, int ordinal, CUstream stream, Op op, const Facts& facts);

 private:
  const Ready& Prepare(Platform platform, int ordinal, CUstream stream, Op op, const Facts& facts);
  std::shared_ptr<const Kernel> Choose(Op op, const Facts& facts, Capability capability) const;
  std::shared_ptr<const Library> Load(const Driver& driver, Platform platform, const Ready& ready);

  struct Slot {
    std::mutex loading;
    std::weak_ptr<const Library> library;
  };

  mutable std::mutex mutex_;  // held for the containers below, never during a driver call
  std::vector<std::shared_ptr<const Kernel>> kernels_;
  std::map<std::pair<Platform, std::string>, std::shared_ptr<Slot>> slots_;
  std::deque<Ready> owned_;  // what `ready_` links, and what an install outdated
  std::atomic<const Ready*> ready_{nullptr};
  std::optional<Driver> installed_;
};

}  // namespace jax_dsa

#endif  // JAX_DSA_REGISTRY_H_
