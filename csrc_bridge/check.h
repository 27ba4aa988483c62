// What a custom call was given, held to what the operation's signature says.

#ifndef JAX_DSA_CHECK_H_
#define JAX_DSA_CHECK_H_

#include <array>
#include <string>

#include "error.h"
#include "plan.h"
#include "xla/ffi/api/ffi.h"

namespace jax_dsa {

namespace ffi = ::xla::ffi;

inline constexpr int64_t kAbi =
    1;  // of operands, results and attributes, which "v1" in the names says

inline const char* DtypeName(ffi::DataType type) {
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

}  // namespace jax_dsa

#endif  // JAX_DSA_CHECK_H_
