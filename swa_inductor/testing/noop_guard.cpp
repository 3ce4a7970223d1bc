// A device guard for CUDA that does nothing, put in place and taken away on request.
//
// PyTorch switches devices around every in-place operator, also when the tensor is fake. Without a GPU there is either no CUDA
// guard at all (CPU builds) or one that fails (CUDA builds), so a graph that mutates a fake CUDA input cannot be traced.
#include <c10/core/impl/DeviceGuardImplInterface.h>

namespace {
using c10::impl::device_guard_impl_registry;
constexpr auto kSlot = static_cast<size_t>(c10::DeviceType::CUDA);
const c10::impl::NoOpDeviceGuardImpl<c10::DeviceType::CUDA> kNoopGuard;
const c10::impl::DeviceGuardImplInterface* previous = nullptr;
} // namespace

extern "C" void noop_guard_install() {
  previous = device_guard_impl_registry[kSlot].exchange(&kNoopGuard);
}

extern "C" void noop_guard_remove() {
  device_guard_impl_registry[kSlot].store(previous);
}
