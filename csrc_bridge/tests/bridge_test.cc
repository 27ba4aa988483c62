// Unit tests of the bridge over a driver that records, without JAX: for compilers' sanitizers.
// Prints "N passed, N failed" and fails if any did. tests/ffi/sanitizers_test.py builds and runs
// it.

#include "../bridge.h"

#include <cstdio>
#include <cstring>
#include <functional>
#include <string>
#include <thread>
#include <vector>

#include "../error.h"
#include "../launch.h"
#include "../plan.h"
#include "../registry.h"
#include "xla/ffi/api/c_api.h"

extern "C" XLA_FFI_Error* jax_dsa_fwd_v1_cpu_execute(XLA_FFI_CallFrame*);

// What XLA keeps in an error; here its text.
struct XLA_FFI_Error {
  std::string text;
};

namespace jax_dsa {
namespace {

int passed = 0, failed = 0;

void Expect(bool right, const char* text, int line) {
  ++(right ? passed : failed);
  if (!right) std::printf("bridge_test.cc:%d: %s\n", line, text);
}
#define EXPECT(...) Expect((__VA_ARGS__), #__VA_ARGS__, __LINE__)

bool Contains(const std::string& text, const std::string& part) {
  if (text.find(part) != std::string::npos) return true;
  std::printf("got: %s\n", text.c_str());
  return false;
}

std::string Thrown(const std::function<void()>& action) {
  try {
    action();
  } catch (const std::exception& error) {
    return error.what();
  }
  return "nothing thrown";
}

// ---- The driver that records.

struct Recorded {
  int loads = 0, unloads = 0, launches = 0, memsets = 0;
  std::vector<unsigned char> parameters;  // of the last launch, gathered by the sizes below
  std::vector<size_t> sizes;
  CUresult load_result = CUDA_SUCCESS;
} recorded;

CUresult GetAttribute(int* value, CUdevice_attribute attribute, CUdevice) {
  *value = attribute == CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR ? 9 : 0;
  return CUDA_SUCCESS;
}
CUresult ErrorText(CUresult, const char** text) {
  *text = "A_CAUSE";
  return CUDA_SUCCESS;
}
CUresult GetFunction(CUfunction* function, CUkernel kernel) {
  *function = reinterpret_cast<CUfunction>(kernel);
  return CUDA_SUCCESS;
}
CUresult SetAttribute(CUfunction_attribute, int, CUkernel, CUdevice) { return CUDA_SUCCESS; }
CUresult GetKernel(CUkernel* kernel, CUlibrary library, const char*) {
  *kernel = reinterpret_cast<CUkernel>(library);
  return CUDA_SUCCESS;
}
CUresult LoadData(CUlibrary* library, const void*, CUjit_option*, void**, unsigned,
                  CUlibraryOption*, void**, unsigned) {
  ++recorded.loads;
  *library = reinterpret_cast<CUlibrary>(&recorded);
  return recorded.load_result;
}
CUresult Unload(CUlibrary) {
  ++recorded.unloads;
  return CUDA_SUCCESS;
}
CUresult SetMemory(CUdeviceptr address, unsigned char value, size_t bytes, CUstream) {
  ++recorded.memsets;
  std::memset(reinterpret_cast<void*>(address), value, bytes);
  return CUDA_SUCCESS;
}
CUresult EncodeTiled(CUtensorMap* map, CUtensorMapDataType, cuuint32_t, void*, const cuuint64_t*,
                     const cuuint64_t*, const cuuint32_t*, const cuuint32_t*, CUtensorMapInterleave,
                     CUtensorMapSwizzle, CUtensorMapL2promotion, CUtensorMapFloatOOBfill) {
  std::memset(map, 0xA5, sizeof(*map));
  return CUDA_SUCCESS;
}
CUresult LaunchEx(const CUlaunchConfig*, CUfunction, void** parameters, void**) {
  ++recorded.launches;
  recorded.parameters.clear();
  for (size_t i = 0; i < recorded.sizes.size(); ++i) {
    const auto* bytes = static_cast<const unsigned char*>(parameters[i]);
    recorded.parameters.insert(recorded.parameters.end(), bytes, bytes + recorded.sizes[i]);
  }
  return CUDA_SUCCESS;
}

template <typename Function>
void* Address(Function* function) {
  void* address;
  std::memcpy(&address, &function, sizeof(address));
  return address;
}

void InstallDriver() {
  const char* names[] = {"cuDeviceGetAttribute", "cuGetErrorName",        "cuGetErrorString",
                         "cuKernelGetFunction",  "cuKernelSetAttribute",  "cuLaunchKernelEx",
                         "cuLibraryGetKernel",   "cuLibraryLoadData",     "cuLibraryUnload",
                         "cuMemsetD8Async",      "cuTensorMapEncodeTiled"};
  void* functions[] = {Address(GetAttribute), Address(ErrorText),    Address(ErrorText),
                       Address(GetFunction),  Address(SetAttribute), Address(LaunchEx),
                       Address(GetKernel),    Address(LoadData),     Address(Unload),
                       Address(SetMemory),    Address(EncodeTiled)};
  char error[256] = "";
  EXPECT(jax_dsa_install_driver(names, functions, 11, error, sizeof(error)) == 0);
}

// ---- A kernel, as Python installs it.

struct Given {
  JaxDsaFact facts[3] = {{"dtype", "bfloat16"}, {"head_dim", "8"}, {"value_dim", "4"}};
  std::vector<JaxDsaParameter> parameters = {{"q", "pointer", "", nullptr},
                                             {"S", "scalar", "i32", nullptr},
                                             {"scale", "scalar", "f64", nullptr},
                                             {"K", "scalar", "i32", nullptr}};
  JaxDsaKernel kernel{};

  JaxDsaKernel& Build() {
    kernel.symbol = "kernel";
    kernel.arch = "sm_90a";
    kernel.op = "forward";
    kernel.minimum_driver = "525.60.13";
    kernel.major = 9;
    kernel.facts = facts;
    kernel.num_facts = 3;
    kernel.parameters = parameters.data();
    kernel.num_parameters = static_cast<int32_t>(parameters.size());
    const char* grid[] = {"G*S", "ceil(H/64)", "1"};
    for (int i = 0; i < 3; ++i) {
      kernel.grid[i] = grid[i];
      kernel.block[i] = kernel.cluster[i] = 1;
    }
    kernel.dynamic_shared_bytes = 100000;
    kernel.image_hash = "hash";
    kernel.image = "image";
    kernel.image_size = 5;
    return kernel;
  }
};

Problem MakeProblem() {
  Problem problem;
  problem.facts = {8, 4, Dtype::kBfloat16};
  problem.scale = 0.5;
  problem.sizes = {2, 3, 5, 7, 65, 8, 0};
  problem.data[0] = reinterpret_cast<void*>(0x1122334455667788);
  return problem;
}

template <typename Value>
Value At(const LaunchPlan& plan, int parameter) {
  Value value;
  std::memcpy(&value, plan.parameters.data() + plan.offsets[parameter], sizeof(value));
  return value;
}

void TestFormulas() {
  const Problem problem = MakeProblem();
  const auto value = [&](const char* text) { return Evaluate(ParseFormula(text), problem); };
  EXPECT(value("1") == 1);
  EXPECT(value("G*S") == 6);
  EXPECT(value("4*T*ceil(H/64)*D") == 4 * 5 * 2 * 8);
  EXPECT(value("ceil(H/65)") == 1);
  for (const char* bad : {"", "*", "G*", "G+S", "ceil(H/0)", "ceil(H)", "ceil(/2)", "ceil(H/2",
                          "sink_stride", "-1", "0", "2147483648", "ceil(", "V"}) {
    EXPECT(Contains(Thrown([&] { ParseFormula(bad); }), "formula"));
  }
  EXPECT(Contains(Thrown([&] { value("2147483647*2147483647*2147483647"); }), "exceeds 64 bits"));
}

void TestPacking() {
  Given given;
  const Kernel kernel = ParseKernel(given.Build());
  LaunchPlan plan;
  MakePlan(kernel, MakeProblem(), plan);
  EXPECT(plan.num_parameters == 4);
  const int want[] = {0, 8, 16, 24};  // the double is aligned to 8
  EXPECT(std::memcmp(plan.offsets.data(), want, sizeof(want)) == 0);
  EXPECT(plan.parameter_bytes == 28);
  EXPECT(At<uint64_t>(plan, 0) == 0x1122334455667788);
  EXPECT(At<int32_t>(plan, 1) == 3);
  EXPECT(At<double>(plan, 2) == 0.5);
  EXPECT(At<int32_t>(plan, 3) == 7);
  EXPECT(plan.grid == std::array<unsigned, 3>{6, 2, 1});

  Problem large = MakeProblem();
  large.sizes[kK] = int64_t{1} << 31;
  EXPECT(Contains(Thrown([&] { MakePlan(kernel, large, plan); }), "K = 2147483648 does not fit"));
  large = MakeProblem();
  large.sizes[kG] = int64_t{1} << 31;
  EXPECT(Contains(Thrown([&] { MakePlan(kernel, large, plan); }), "grid x = G*S"));
}

void TestTensorMaps() {
  Given given;
  JaxDsaTensorMap map{};
  map.data_type = "BFLOAT16";
  map.buffer = "kv";
  map.rank = 2;
  map.global_dim[0] = "D";
  map.global_dim[1] = "G*T";
  map.global_strides[0] = "2*D";
  map.box_dim[0] = map.box_dim[1] = 4;
  map.element_strides[0] = map.element_strides[1] = 1;
  map.interleave = map.oob_fill = map.l2_promotion = "NONE";
  map.swizzle = "64B";
  given.parameters.insert(given.parameters.begin() + 1, {"map", "tensor_map", "", &map});
  const Kernel kernel = ParseKernel(given.Build());
  LaunchPlan plan;
  MakePlan(kernel, MakeProblem(), plan);
  EXPECT(plan.num_tensor_maps == 1);
  EXPECT(plan.offsets[1] == 64);  // after the pointer, at the next multiple of 64
  EXPECT(plan.offsets[2] == 192);
  EXPECT(plan.tensor_maps[0].global_dim[1] == 10);
  EXPECT(plan.tensor_maps[0].global_strides[0] == 16);
  EXPECT(plan.tensor_maps[0].swizzle == CU_TENSOR_MAP_SWIZZLE_64B);

  map.rank = 6;
  EXPECT(Contains(Thrown([&] { ParseKernel(given.Build()); }), "got rank 6, want 1 to 5"));
  map.rank = 2;
  given.parameters.assign(kMaxBuffers + 1, {"map", "tensor_map", "", &map});
  EXPECT(Contains(Thrown([&] { ParseKernel(given.Build()); }), "11 tensor maps"));
  given.parameters.assign(kMaxParameters + 1, {"q", "pointer", "", nullptr});
  EXPECT(Contains(Thrown([&] { ParseKernel(given.Build()); }), "33 parameters, want at most 32"));
}

void TestLookup() {
  InstallDriver();
  Given given;
  char error[512] = "";
  EXPECT(jax_dsa_install_kernels(&given.Build(), 1, error, sizeof(error)) == 0);
  recorded = Recorded{};
  Registry& registry = Registry::Get();
  const Facts facts = MakeProblem().facts;
  const auto find = [&] { return &registry.Find(Platform::kCpu, 0, nullptr, Op::kForward, facts); };
  recorded.load_result = CUDA_ERROR_OUT_OF_MEMORY;
  const std::string text = Thrown([&] { find(); });
  EXPECT(Contains(text, "kernel 'kernel'"));
  EXPECT(Contains(text, "image of 5 bytes"));
  EXPECT(Contains(text, "A_CAUSE (2: A_CAUSE)"));
  recorded = Recorded{};

  std::vector<std::thread> threads;
  for (int i = 0; i < 4; ++i) threads.emplace_back([&] { find(); });
  for (std::thread& thread : threads) thread.join();
  EXPECT(recorded.loads == 1);
  EXPECT(find() == find());
  const Facts other = {16, 4, Dtype::kFloat16};
  EXPECT(Contains(Thrown([&] { registry.Find(Platform::kCpu, 0, nullptr, Op::kForward, other); }),
                  "no compiled jax_dsa forward kernel of head_dim=16 value_dim=4 dtype=float16"));
  EXPECT(Contains(Thrown([&] { registry.Find(Platform::kCpu, 0, nullptr, Op::kBackward, facts); }),
                  "no compiled jax_dsa backward kernel"));
  jax_dsa_reset();
  EXPECT(recorded.unloads == 1);
  EXPECT(Contains(Thrown([&] { find(); }), "none is"));
}

// ---- The handler, called as XLA calls it.

XLA_FFI_Error* CreateError(XLA_FFI_Error_Create_Args* args) {
  return new XLA_FFI_Error{args->message};
}

class Frame {
 public:
  Frame() {
    api_.struct_size = XLA_FFI_Api_STRUCT_SIZE;
    api_.XLA_FFI_Error_Create = CreateError;
    Add(0, XLA_FFI_DataType_BF16, {1, 2, 3, 8});
    Add(1, XLA_FFI_DataType_BF16, {1, 5, 8});
    Add(2, XLA_FFI_DataType_S32, {1, 2, 7});
    Add(3, XLA_FFI_DataType_S32, {1, 2});
    Add(4, XLA_FFI_DataType_F32, {1, 3});
    Add(5, XLA_FFI_DataType_BF16, {1, 2, 3, 4});
    Add(6, XLA_FFI_DataType_F32, {1, 2, 3});
  }

  void Add(int i, XLA_FFI_DataType type, std::vector<int64_t> dims) {
    dims_[i] = std::move(dims);
    buffers_[i] = XLA_FFI_Buffer{};
    buffers_[i].struct_size = XLA_FFI_Buffer_STRUCT_SIZE;
    buffers_[i].dtype = type;
    buffers_[i].data = memory_;
    buffers_[i].rank = static_cast<int64_t>(dims_[i].size());
    buffers_[i].dims = dims_[i].data();
  }

  // "" or the error's text.
  std::string Run(XLA_FFI_Error* (*handler)(XLA_FFI_CallFrame*)) {
    XLA_FFI_ArgType arg_types[5];
    XLA_FFI_RetType ret_types[2];
    void* args[5];
    void* rets[2];
    for (int i = 0; i < 5; ++i) arg_types[i] = XLA_FFI_ArgType_BUFFER, args[i] = &buffers_[i];
    for (int i = 0; i < 2; ++i) ret_types[i] = XLA_FFI_RetType_BUFFER, rets[i] = &buffers_[5 + i];
    int64_t abi = 1, value_dim = 4;
    double scale = 0.5;
    XLA_FFI_Scalar scalars[] = {{XLA_FFI_DataType_S64, &abi},
                                {XLA_FFI_DataType_F64, &scale},
                                {XLA_FFI_DataType_S64, &value_dim}};
    XLA_FFI_ByteSpan texts[] = {{"abi", 3}, {"scale", 5}, {"value_dim", 9}};
    XLA_FFI_AttrType attr_types[3];
    XLA_FFI_ByteSpan* names[3];
    void* attrs[3];
    for (int i = 0; i < 3; ++i) {
      attr_types[i] = XLA_FFI_AttrType_SCALAR;
      names[i] = &texts[i];
      attrs[i] = &scalars[i];
    }
    XLA_FFI_CallFrame frame{};
    frame.struct_size = XLA_FFI_CallFrame_STRUCT_SIZE;
    frame.api = &api_;
    frame.stage = XLA_FFI_ExecutionStage_EXECUTE;
    frame.args = {XLA_FFI_Args_STRUCT_SIZE, nullptr, 5, arg_types, args};
    frame.rets = {XLA_FFI_Rets_STRUCT_SIZE, nullptr, 2, ret_types, rets};
    frame.attrs = {XLA_FFI_Attrs_STRUCT_SIZE, nullptr, 3, attr_types, names, attrs};
    XLA_FFI_Error* error = handler(&frame);
    const std::string text = error ? error->text : "";
    delete error;
    return text;
  }

 private:
  XLA_FFI_Api api_{};
  XLA_FFI_Buffer buffers_[7];
  std::vector<int64_t> dims_[7];
  char memory_[1024];
};

void TestHandler() {
  InstallDriver();
  Given given;
  const char* zeroed[] = {"lse"};
  given.Build().zeroed = zeroed;
  given.kernel.num_zeroed = 1;
  char error[512] = "";
  EXPECT(jax_dsa_install_kernels(&given.kernel, 1, error, sizeof(error)) == 0);
  recorded = Recorded{};
  recorded.sizes = {8, 4, 8, 4};
  const int64_t before = jax_dsa_launch_count();
  EXPECT(Frame().Run(jax_dsa_fwd_v1_cpu_execute) == "");
  EXPECT(recorded.launches == 1 && recorded.memsets == 1);
  EXPECT(jax_dsa_launch_count() == before + 1);
  EXPECT(recorded.parameters.size() == 24 && recorded.parameters[8] == 2);

  Frame wrong;
  wrong.Add(1, XLA_FFI_DataType_BF16, {1, 5, 16});
  EXPECT(Contains(wrong.Run(jax_dsa_fwd_v1_cpu_execute), "kv: got shape [1, 5, 16]"));
  wrong.Add(1, XLA_FFI_DataType_BF16, {});
  EXPECT(Contains(wrong.Run(jax_dsa_fwd_v1_cpu_execute), "kv: got shape [], want [G, T, D]"));
  wrong.Add(1, XLA_FFI_DataType_C64, {1, 5, 8});
  EXPECT(Contains(wrong.Run(jax_dsa_fwd_v1_cpu_execute), "kv: got dtype another dtype"));
  jax_dsa_reset();
  EXPECT(Contains(Frame().Run(jax_dsa_fwd_v1_cpu_execute), "jax_dsa_fwd_v1: compiled kernels"));
}

void TestErrorsFitTheirBuffer() {
  Given given;
  given.Build().op = "sideways";
  char error[8];
  std::memset(error, 'x', sizeof(error));
  EXPECT(jax_dsa_install_kernels(&given.kernel, 1, error, sizeof(error)) == -1);
  EXPECT(std::strlen(error) == 7);
  EXPECT(jax_dsa_install_kernels(&given.kernel, 1, nullptr, 0) == -1);
  const char* names[] = {"cuNothing"};
  void* functions[] = {nullptr};
  EXPECT(jax_dsa_install_driver(names, functions, 1, nullptr, 0) == -1);
}

}  // namespace
}  // namespace jax_dsa

int main() {
  jax_dsa::TestFormulas();
  jax_dsa::TestPacking();
  jax_dsa::TestTensorMaps();
  jax_dsa::TestLookup();
  jax_dsa::TestHandler();
  jax_dsa::TestErrorsFitTheirBuffer();
  std::printf("%d passed, %d failed\n", jax_dsa::passed, jax_dsa::failed);
  return jax_dsa::failed == 0 ? 0 : 1;
}
