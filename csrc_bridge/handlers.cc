// The custom calls: bind, check, plan, launch.

#include <array>

#include "check.h"
#include "error.h"
#include "launch.h"
#include "plan.h"
#include "registry.h"
#include "xla/ffi/api/ffi.h"

namespace jax_dsa {
namespace {

using Stage = ffi::ExecutionStage;

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
                  scale,
                  value_dim,
                  abi};
  return Answer<platform, stage>("jax_dsa_fwd_v1", context, call);
}

template <Platform platform, Stage stage>
ffi::Error Backward(ffi::Context context, Operand q, Operand kv, Operand indices,
                    Operand topk_length, Operand lse, Operand alpha, Operand beta, Operand dout,
                    Return dq, Return dkv, double scale, int64_t value_dim, int64_t abi) {
  const Call call{Op::kBackward,
                  {q, kv, indices, topk_length, lse, alpha, beta, dout, *dq, *dkv},
                  scale,
                  value_dim,
                  abi};
  return Answer<platform, stage>("jax_dsa_bwd_v1", context, call);
}

template <Stage stage>
auto BindForward() {
  return ffi::Ffi::Bind<stage>()
      .template Ctx<ffi::Context>()    // stream, device ordinal
      .template Arg<Operand>()         // q [G, S, H, D]
      .template Arg<Operand>()         // kv [G, T, D]
      .template Arg<Operand>()         // indices [G, S, K] int32
      .template Arg<Operand>()         // topk_length [G, S] int32
      .template Arg<Operand>()         // sink [1 or G, H] float32
      .template Ret<ffi::AnyBuffer>()  // out [G, S, H, value_dim]
      .template Ret<ffi::AnyBuffer>()  // lse [G, S, H] float32
      .template Attr<double>("scale")
      .template Attr<int64_t>("value_dim")
      .template Attr<int64_t>("abi");
}

template <Stage stage>
auto BindBackward() {
  return ffi::Ffi::Bind<stage>()
      .template Ctx<ffi::Context>()    // stream, device ordinal
      .template Arg<Operand>()         // q [G, S, H, D]
      .template Arg<Operand>()         // kv [G, T, D]
      .template Arg<Operand>()         // indices [G, S, K] int32
      .template Arg<Operand>()         // topk_length [G, S] int32
      .template Arg<Operand>()         // lse [G, S, H] float32
      .template Arg<Operand>()         // alpha [G, S, H] float32
      .template Arg<Operand>()         // beta [G, S, H] float32
      .template Arg<Operand>()         // dout [G, S, H, value_dim]
      .template Ret<ffi::AnyBuffer>()  // dq [G, S, H, D]
      .template Ret<ffi::AnyBuffer>()  // dkv [G, T, D] float32
      .template Attr<double>("scale")
      .template Attr<int64_t>("value_dim")
      .template Attr<int64_t>("abi");
}

}  // namespace

// One symbol for each target, platform and stage.
#define JAX_DSA_DEFINE(symbol, function, platform, stage)                              \
  constexpr auto symbol##_impl = function<Platform::platform, Stage::stage>;           \
  extern "C" JAX_DSA_EXPORT XLA_FFI_Error* symbol(XLA_FFI_CallFrame*);                 \
  XLA_FFI_DEFINE_HANDLER_SYMBOL(symbol, symbol##_impl, Bind##function<Stage::stage>(), \
                                {ffi::Traits::kCmdBufferCompatible})

JAX_DSA_DEFINE(jax_dsa_fwd_v1_cuda_initialize, Forward, kCuda, kInitialize);
JAX_DSA_DEFINE(jax_dsa_fwd_v1_cuda_execute, Forward, kCuda, kExecute);
JAX_DSA_DEFINE(jax_dsa_bwd_v1_cuda_initialize, Backward, kCuda, kInitialize);
JAX_DSA_DEFINE(jax_dsa_bwd_v1_cuda_execute, Backward, kCuda, kExecute);
JAX_DSA_DEFINE(jax_dsa_fwd_v1_cpu_execute, Forward, kCpu, kExecute);
JAX_DSA_DEFINE(jax_dsa_bwd_v1_cpu_execute, Backward, kCpu, kExecute);

}  // namespace jax_dsa
