// The custom calls: bind, check, plan, launch.

#include <array>

#include "error.h"
#include "launch.h"
#include "plan.h"
#include "registry.h"
#include "xla/ffi/api/ffi.h"

namespace jax_dsa {
namespace {

namespace ffi = ::xla::ffi;
using Stage = ffi::ExecutionStage;

constexpr int64_t kAbi = 1;  // of operands, results and attributes, which "v1" in the names says

ffi::ErrorCode Code(ErrorKind kind) {
  switch (kind) {
    case ErrorKind::kInvalidArgument: return ffi::ErrorCode::kInvalidArgument;
    case ErrorKind::kFailedPrecondition: return ffi::ErrorCode::kFailedPrecondition;
    case ErrorKind::kNotFound: return ffi::ErrorCode::kNotFound;
    case ErrorKind::kOutOfMemory: return ffi::ErrorCode::kResourceExhausted;
    case ErrorKind::kInternal: return ffi::ErrorCode::kInternal;
  }
  return ffi::ErrorCode::kInternal;
}

const char* DtypeName(ffi::DataType type) {
  switch (type) {
    case ffi::DataType::BF16: return "bfloat16";
    case ffi::DataType::F16: return "float16";
    case ffi::DataType::F32: return "float32";
    case ffi::DataType::F64: return "float64";
    case ffi::DataType::S32: return "int32";
    case ffi::DataType::S64: return "int64";
    default: return "another dtype";
  }
}

// What one custom call was given.
struct Call {
  Op op;
  std::array<ffi::AnyBuffer, kMaxBuffers> buffers;  // operands, then results
  double scale;
  int64_t value_dim;
  int64_t abi;
};

// Reads the sizes of a problem off its buffers, and holds every buffer to them.
class Checker {
 public:
  Checker(const Call& call, Problem& problem)
      : call_(call), signature_(SignatureOf(call.op)), problem_(problem) {}

  void Run() {
    if (call_.abi != kAbi) {
      Fail(ErrorKind::kInvalidArgument, "abi: got ", call_.abi, ", want ", kAbi,
           ": the program was made by another version of jax_dsa");
    }
    problem_.op = call_.op;
    problem_.scale = call_.scale;
    problem_.facts.value_dim = call_.value_dim;
    const ffi::DataType type = call_.buffers[0].element_type();
    if (type != ffi::DataType::BF16 && type != ffi::DataType::F16) {
      Fail(ErrorKind::kInvalidArgument, "q: got dtype ", DtypeName(type),
           ", want bfloat16 or float16");
    }
    problem_.facts.dtype = type == ffi::DataType::BF16 ? Dtype::kBfloat16 : Dtype::kFloat16;
    for (int i = 0; i < signature_.count; ++i) CheckBuffer(i, type);
    problem_.facts.head_dim = problem_.sizes[kD];
  }

 private:
  void CheckBuffer(int i, ffi::DataType problem_type) {
    const BufferSpec& spec = signature_.buffers[i];
    const ffi::AnyBuffer& buffer = call_.buffers[i];
    const ffi::DataType want = spec.type == 'x'   ? problem_type
                               : spec.type == 'i' ? ffi::DataType::S32
                                                  : ffi::DataType::F32;
    if (buffer.element_type() != want) {
      Fail(ErrorKind::kInvalidArgument, spec.name, ": got dtype ", DtypeName(buffer.element_type()),
           ", want ", DtypeName(want));
    }
    const ffi::AnyBuffer::Dimensions dims = buffer.dimensions();
    bool fits = dims.size() == std::char_traits<char>::length(spec.dims);
    for (size_t d = 0; fits && d < dims.size(); ++d) fits = Fits(spec.dims[d], dims[d]);
    if (!fits) FailShape(spec, dims);
    problem_.data[i] = buffer.untyped_data();
    problem_.bytes[i] = buffer.size_bytes();
  }

  // The first buffer that has a size says what it is.
  bool Fits(char dim, int64_t size) {
    if (size < 1) return false;
    if (dim == 'V') return size == problem_.facts.value_dim;
    if (dim == '1') {
      problem_.sizes[kSinkStride] = size == 1 ? 0 : problem_.sizes[kH];
      return size == 1 || size == problem_.sizes[kG];
    }
    int64_t& known = problem_.sizes[Index(dim)];
    if (known == 0) known = size;
    return known == size;
  }

  static int Index(char dim) {
    switch (dim) {
      case 'G': return kG;
      case 'S': return kS;
      case 'T': return kT;
      case 'K': return kK;
      case 'H': return kH;
      default: return kD;
    }
  }

  [[noreturn]] void FailShape(const BufferSpec& spec, ffi::AnyBuffer::Dimensions dims) const {
    std::string got, want, sizes;
    for (int64_t size : dims) got += (got.empty() ? "" : ", ") + std::to_string(size);
    for (const char* dim = spec.dims; *dim; ++dim) {
      const int64_t size = *dim == 'V'   ? problem_.facts.value_dim
                           : *dim == '1' ? problem_.sizes[kG]
                                         : problem_.sizes[Index(*dim)];
      const std::string name = *dim == 'V' ? "value_dim" : *dim == '1' ? "1 or G" : Text(*dim);
      want += (want.empty() ? "" : ", ") + name;
      if (size > 0 && dims.size() > 0) {
        sizes += Text(sizes.empty() ? "" : ", ", *dim == '1' ? "G" : name, "=", size);
      }
    }
    Fail(ErrorKind::kInvalidArgument, spec.name, ": got shape [", got, "], want [", want,
         "], sizes of at least 1", sizes.empty() ? "" : ", with ", sizes);
  }

  const Call& call_;
  const Signature& signature_;
  Problem& problem_;
};

template <Platform platform>
CUstream StreamOf(const ffi::Context& context) {
  if constexpr (platform == Platform::kCpu) return nullptr;
  auto stream = context.get<ffi::PlatformStream<CUstream>>();
  if (!stream.has_value()) Fail(ErrorKind::kInternal, stream.error().message());
  return stream.value();
}

// Looked up and loaded when an executable initialises, so that nothing of it happens while a
// command buffer is captured; launched when it executes.
template <Platform platform, Stage stage>
void Serve(const ffi::Context& context, const Call& call) {
  Problem problem;
  Checker(call, problem).Run();
  // All CPU devices have one driver and are one device to it.
  int32_t ordinal = 0;
  if constexpr (platform == Platform::kCuda) {
    auto device = context.get<ffi::DeviceOrdinal>();
    if (!device.has_value()) Fail(ErrorKind::kInternal, device.error().message());
    ordinal = device.value();
  }
  Registry& registry = Registry::Get();
  const CUstream stream = StreamOf<platform>(context);
  const Ready& ready = registry.Find(platform, ordinal, stream, problem.op, problem.facts);
  if constexpr (stage == Stage::kExecute) {
    LaunchPlan plan;
    MakePlan(*ready.kernel, problem, plan);
    Launch(registry.DriverOf(platform), ready, plan, stream);
  }
}

template <Platform platform, Stage stage>
ffi::Error Answer(const char* target, const ffi::Context& context, const Call& call) {
  try {
    Serve<platform, stage>(context, call);
    return ffi::Error::Success();
  } catch (const BridgeError& error) {
    return ffi::Error(Code(error.kind), Text(target, ": ", error.what()));
  } catch (const std::exception& error) {
    return ffi::Error::Internal(Text(target, ": ", error.what()));
  }
}

using Operand = ffi::AnyBuffer;
using Return = ffi::Result<ffi::AnyBuffer>;

template <Platform platform, Stage stage>
ffi::Error Forward(ffi::Context context, Operand q, Operand kv, Operand indices,
                   Operand topk_length, Operand sink, Return out, Return lse, double scale,
                   int64_t value_dim, int64_t abi) {
  // Entries past the signature are not looked at.
  const Call call{Op::kForward,
                  {q, kv, indices, topk_length, sink, *out, *lse, q, q, q},
                  scale, value_dim, abi};
  return Answer<platform, stage>("jax_dsa_fwd_v1", context, call);
}

template <Platform platform, Stage stage>
ffi::Error Backward(ffi::Context context, Operand q, Operand kv, Operand indices,
                    Operand topk_length, Operand lse, Operand alpha, Operand beta, Operand dout,
                    Return dq, Return dkv, double scale, int64_t value_dim, int64_t abi) {
  const Call call{Op::kBackward,
                  {q, kv, indices, topk_length, lse, alpha, beta, dout, *dq, *dkv},
                  scale, value_dim, abi};
  return Answer<platform, stage>("jax_dsa_bwd_v1", context, call);
}

template <Stage stage>
auto BindForward() {
  return ffi::Ffi::Bind<stage>()
      .template Ctx<ffi::Context>()   // stream, device ordinal
      .template Arg<Operand>()        // q [G, S, H, D]
      .template Arg<Operand>()        // kv [G, T, D]
      .template Arg<Operand>()        // indices [G, S, K] int32
      .template Arg<Operand>()        // topk_length [G, S] int32
      .template Arg<Operand>()        // sink [1 or G, H] float32
      .template Ret<ffi::AnyBuffer>()  // out [G, S, H, value_dim]
      .template Ret<ffi::AnyBuffer>()  // lse [G, S, H] float32
      .template Attr<double>("scale")
      .template Attr<int64_t>("value_dim")
      .template Attr<int64_t>("abi");
}

template <Stage stage>
auto BindBackward() {
  return ffi::Ffi::Bind<stage>()
      .template Ctx<ffi::Context>()   // stream, device ordinal
      .template Arg<Operand>()        // q [G, S, H, D]
      .template Arg<Operand>()        // kv [G, T, D]
      .template Arg<Operand>()        // indices [G, S, K] int32
      .template Arg<Operand>()        // topk_length [G, S] int32
      .template Arg<Operand>()        // lse [G, S, H] float32
      .template Arg<Operand>()        // alpha [G, S, H] float32
      .template Arg<Operand>()        // beta [G, S, H] float32
      .template Arg<Operand>()        // dout [G, S, H, value_dim]
      .template Ret<ffi::AnyBuffer>()  // dq [G, S, H, D]
      .template Ret<ffi::AnyBuffer>()  // dkv [G, T, D] float32
      .template Attr<double>("scale")
      .template Attr<int64_t>("value_dim")
      .template Attr<int64_t>("abi");
}

}  // namespace

// One symbol for each target, platform and stage.
#define JAX_DSA_DEFINE(symbol, function, platform, stage)                                   \
  constexpr auto symbol##_impl = function<Platform::platform, Stage::stage>;                \
  extern "C" JAX_DSA_EXPORT XLA_FFI_Error* symbol(XLA_FFI_CallFrame*);                      \
  XLA_FFI_DEFINE_HANDLER_SYMBOL(symbol, symbol##_impl, Bind##function<Stage::stage>(),      \
                                {ffi::Traits::kCmdBufferCompatible})

JAX_DSA_DEFINE(jax_dsa_fwd_v1_cuda_initialize, Forward, kCuda, kInitialize);
JAX_DSA_DEFINE(jax_dsa_fwd_v1_cuda_execute, Forward, kCuda, kExecute);
JAX_DSA_DEFINE(jax_dsa_bwd_v1_cuda_initialize, Backward, kCuda, kInitialize);
JAX_DSA_DEFINE(jax_dsa_bwd_v1_cuda_execute, Backward, kCuda, kExecute);
JAX_DSA_DEFINE(jax_dsa_fwd_v1_cpu_execute, Forward, kCpu, kExecute);
JAX_DSA_DEFINE(jax_dsa_bwd_v1_cpu_execute, Backward, kCpu, kExecute);

}  // namespace jax_dsa
