#include "csrc/torch/autograd_guard.h"

#include "csrc/torch/torch_headers.h"

namespace tle {

namespace {

bool requires_grad(const c10::IValue& value) {
  if (value.isTensor()) return value.toTensor().defined() && value.toTensor().requires_grad();
  if (value.isList()) {
    for (const c10::IValue& item : value.toListRef())
      if (requires_grad(item)) return true;
  }
  return false;
}

void guarded_call(const c10::OperatorHandle& op, c10::DispatchKeySet keys, torch::jit::Stack* stack) {
  if (c10::GradMode::is_enabled()) {
    const auto& arguments = op.schema().arguments();
    for (size_t i = 0; i < arguments.size(); ++i) {
      TORCH_CHECK(!requires_grad((*stack)[stack->size() - arguments.size() + i]), op.schema().name(), ": argument '",
                  arguments[i].name(),
                  "' requires a gradient, and this operator has none; call it under torch.no_grad() or "
                  "torch.inference_mode(), or detach the tensor");
    }
  }
  op.redispatchBoxed(keys & c10::after_autograd_keyset, stack);
}

}  // namespace

void guard_autograd(torch::Library& library, const std::string& schema) {
  library.impl(schema.substr(0, schema.find('(')).c_str(),
               torch::CppFunction::makeFromBoxedFunction<&guarded_call>());
}

}  // namespace tle
