#include "registry.h"

#include <algorithm>
#include <set>

#include "error.h"

namespace jax_dsa {
namespace {

std::string Arch(Capability capability) { return Text(capability.major, ".", capability.minor); }

// Makes the context of a stream current; contexts matter for the real driver only.
class ScopedContext {
 public:
  ScopedContext(const Driver& driver, CUstream stream) : driver_(driver) {
    const auto who = [] { return std::string("entering the context of the stream"); };
    CUcontext context = nullptr;
    JAX_DSA_CALL(driver, who, cuStreamGetCtx, stream, &context);
    JAX_DSA_CALL(driver, who, cuCtxPushCurrent, context);
  }
  ~ScopedContext() {
    CUcontext context = nullptr;
    driver_.cuCtxPopCurrent(&context);
  }
  ScopedContext(const ScopedContext&) = delete;
  ScopedContext& operator=(const ScopedContext&) = delete;

 private:
  const Driver& driver_;
};

bool Serves(const Kernel& kernel, Capability capability) {
  return kernel.major == capability.major && kernel.minor_low <= capability.minor &&
         capability.minor <= kernel.minor_high;
}

void CheckDriverVersion(const Driver& driver, const Ready& ready) {
  if (driver.cuDriverGetVersion == nullptr || ready.kernel->minimum_cuda == 0) return;
  int present = 0;
  JAX_DSA_CALL(driver, [&] { return ready.Who(); }, cuDriverGetVersion, &present);
  const auto text = [](int version) { return Text(version / 1000, ".", version % 1000 / 10); };
  if (present < ready.kernel->minimum_cuda) {
    Fail(ErrorKind::kFailedPrecondition, ready.Who(), ": the driver serves CUDA ", text(present),
         ", wanted is ", text(ready.kernel->minimum_cuda),
         " or newer: update the NVIDIA driver to ", ready.kernel->minimum_driver, " or newer");
  }
}

}  // namespace

Library::Library(const Driver& driver, const Kernel& kernel, const std::string& who)
    : driver_(driver) {
  JAX_DSA_CALL(
      driver, [&] { return Text(who, ", image of ", kernel.image.size(), " bytes"); },
      cuLibraryLoadData, &library_, kernel.image.data(), nullptr, nullptr, 0, nullptr, nullptr, 0);
}

Library::~Library() { driver_.cuLibraryUnload(library_); }

std::string Ready::Who() const {
  return Text("jax_dsa kernel '", kernel->symbol, "' (", Name(op), ", ", Describe(facts),
              ") compiled for ", kernel->arch, ", device ", ordinal, " of compute capability ",
              Arch(capability));
}

Registry& Registry::Get() {
  // Never destroyed: calls of other threads and of the driver may outlive static destructors.
  static Registry* const registry = new Registry;
  return *registry;
}

void Registry::Install(std::vector<Kernel> kernels) {
  const std::lock_guard<std::mutex> lock(mutex_);
  for (Kernel& kernel : kernels) {
    const auto same = [&kernel](const std::shared_ptr<const Kernel>& other) {
      return other->arch == kernel.arch && other->op == kernel.op && other->facts == kernel.facts;
    };
    auto place = std::find_if(kernels_.begin(), kernels_.end(), same);
    if (place == kernels_.end()) place = kernels_.emplace(kernels_.end());
    *place = std::make_shared<const Kernel>(std::move(kernel));
  }
  ready_.store(nullptr, std::memory_order_release);
}

void Registry::InstallDriver(std::optional<Driver> driver) {
  const std::lock_guard<std::mutex> lock(mutex_);
  // Only what was loaded through the driver that goes; links to the rest are made anew.
  ready_.store(nullptr, std::memory_order_release);
  for (Ready& ready : owned_) {
    if (ready.platform == Platform::kCpu) ready.library = nullptr;
  }
  installed_ = driver;
}

void Registry::Reset() {
  InstallDriver(std::nullopt);
  const std::lock_guard<std::mutex> lock(mutex_);
  owned_.clear();
  slots_.clear();
  kernels_.clear();
}

const Driver& Registry::DriverOf(Platform platform) const {
  if (platform == Platform::kCuda) return CudaDriver();
  if (!installed_) {
    Fail(ErrorKind::kFailedPrecondition,
         "compiled kernels of jax_dsa run on a CPU only where a driver has been installed for it "
         "(the emulator's): none is. Use implementation='xla'");
  }
  return *installed_;
}

const Ready& Registry::Find(Platform platform, int ordinal, CUstream stream, Op op,
                            const Facts& facts) {
  for (const Ready* ready = ready_.load(std::memory_order_acquire); ready; ready = ready->next) {
    if (ready->ordinal == ordinal && ready->op == op && ready->facts == facts &&
        ready->platform == platform) {
      return *ready;
    }
  }
  return Prepare(platform, ordinal, stream, op, facts);
}

const Ready& Registry::Prepare(Platform platform, int ordinal, CUstream stream, Op op,
                               const Facts& facts) {
  const Driver& driver = DriverOf(platform);
  std::optional<ScopedContext> context;
  CUdevice device = 0;
  if (platform == Platform::kCuda) {
    context.emplace(driver, stream);
    JAX_DSA_CALL(
        driver, [] { return std::string("asking for the device"); }, cuCtxGetDevice, &device);
  }
  Ready ready{platform, ordinal, op, facts, nullptr, nullptr, nullptr, {}, nullptr};
  ready.capability = DeviceCapability(driver, device);
  ready.kernel = Choose(op, facts, ready.capability);
  const auto who = [&ready] { return ready.Who(); };
  CheckDriverVersion(driver, ready);
  ready.library = Load(driver, platform, ready);
  CUkernel kernel = nullptr;
  JAX_DSA_CALL(driver, who, cuLibraryGetKernel, &kernel, ready.library->get(),
               ready.kernel->symbol.c_str());
  if (const int bytes = static_cast<int>(ready.kernel->shared_bytes); bytes > 48 * 1024) {
    JAX_DSA_CALL(driver, who, cuKernelSetAttribute, CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES,
                 bytes, kernel, device);
  }
  JAX_DSA_CALL(driver, who, cuKernelGetFunction, &ready.function, kernel);

  const std::lock_guard<std::mutex> lock(mutex_);
  ready.next = ready_.load(std::memory_order_relaxed);
  owned_.push_back(std::move(ready));
  ready_.store(&owned_.back(), std::memory_order_release);
  return owned_.back();
}

std::shared_ptr<const Kernel> Registry::Choose(Op op, const Facts& facts,
                                               Capability capability) const {
  const std::lock_guard<std::mutex> lock(mutex_);
  std::set<std::string> others, archs;
  for (const std::shared_ptr<const Kernel>& kernel : kernels_) {
    const bool fits = kernel->op == op && kernel->facts == facts;
    if (fits && Serves(*kernel, capability)) return kernel;
    if (fits) archs.insert(kernel->arch);
    if (kernel->op == op && Serves(*kernel, capability)) others.insert(Describe(kernel->facts));
  }
  const auto list = [](const std::set<std::string>& all) {
    std::string text;
    for (const std::string& each : all) text += (text.empty() ? "" : "; ") + each;
    return text.empty() ? std::string("none") : text;
  };
  Fail(ErrorKind::kNotFound, "no compiled jax_dsa ", Name(op), " kernel of ", Describe(facts),
       " for a device of compute capability ", Arch(capability),
       "; there are such kernels for: ", list(archs),
       "; other kernels for this device: ", list(others),
       ". `python -m jax_dsa.aot` builds kernels, `python -m jax_dsa.doctor` lists them");
}

std::shared_ptr<const Library> Registry::Load(const Driver& driver, Platform platform,
                                              const Ready& ready) {
  std::shared_ptr<Slot> slot;
  {
    const std::lock_guard<std::mutex> lock(mutex_);
    std::shared_ptr<Slot>& place = slots_[{platform, ready.kernel->image_hash}];
    if (!place) place = std::make_shared<Slot>();
    slot = place;
  }
  const std::lock_guard<std::mutex> lock(slot->loading);
  std::shared_ptr<const Library> library = slot->library.lock();
  if (!library) {
    library = std::make_shared<const Library>(driver, *ready.kernel, ready.Who());
    slot->library = library;
  }
  return library;
}

}  // namespace jax_dsa
