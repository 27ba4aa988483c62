// What the bridge throws. It never leaves the library: the C interface and the XLA handlers turn
// it into text.

#ifndef JAX_DSA_ERROR_H_
#define JAX_DSA_ERROR_H_

#include <sstream>
#include <stdexcept>
#include <string>

namespace jax_dsa {

enum class ErrorKind { kInvalidArgument, kFailedPrecondition, kNotFound, kOutOfMemory, kInternal };

class BridgeError : public std::runtime_error {
 public:
  BridgeError(ErrorKind kind, const std::string& message)
      : std::runtime_error(message), kind(kind) {}

  const ErrorKind kind;
};

template <typename... Parts>
std::string Text(const Parts&... parts) {
  std::ostringstream text;
  (text << ... << parts);
  return text.str();
}

template <typename... Parts>
[[noreturn]] void Fail(ErrorKind kind, const Parts&... parts) {
  throw BridgeError(kind, Text(parts...));
}

}  // namespace jax_dsa

#endif  // JAX_DSA_ERROR_H_
