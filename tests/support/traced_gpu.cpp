// Lets a build of PyTorch without CUDA trace fake tensors of the device `cuda`. No kernel can run there.
//
// `pretend(1)` installs a device guard that does nothing, and hooks that report one GPU with cuDNN. `pretend(0)` restores
// what was there. The hooks object is shared by reference all over PyTorch, so its table of functions is replaced.
#include <ATen/detail/CUDAHooksInterface.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>
#include <cstring>
namespace {
struct Hooks : at::CUDAHooksInterface {
  void init() const override {}
  bool hasCUDA() const override { return true; }
  bool hasCuDNN() const override { return true; }
  bool compiledWithCuDNN() const override { return true; }
  bool supportsBFloat16ConvolutionWithCuDNNv8() const override { return true; }
  bool supportsBFloat16RNNWithCuDNN() const override { return true; }
  bool supportsDilatedConvolutionWithCuDNN() const override { return true; }
  bool supportsDepthwiseConvolutionWithCuDNN() const override { return true; }
  bool hasPrimaryContext(c10::DeviceIndex) const override { return true; }
  long versionCuDNN() const override { return 91000; }
  long versionRuntimeCuDNN() const override { return 91000; }
  double batchnormMinEpsilonCuDNN() const override { return 1e-5; }
  c10::DeviceIndex deviceCount() const override { return 1; }
  c10::DeviceIndex getCurrentDevice() const override { return 0; }
  c10::DeviceIndex current_device() const override { return 0; }
  bool isBuilt() const override { return true; }
  bool isAvailable() const override { return true; }
};
struct Guard : c10::impl::NoOpDeviceGuardImpl<c10::DeviceType::CUDA> {
  c10::Device exchangeDevice(c10::Device) const override { return {c10::DeviceType::CUDA, 0}; }
  c10::Device getDevice() const override { return {c10::DeviceType::CUDA, 0}; }
  c10::Stream getStream(c10::Device) const noexcept override { return c10::Stream(c10::Stream::DEFAULT, c10::Device(c10::DeviceType::CUDA, 0)); }
  c10::Stream exchangeStream(c10::Stream) const noexcept override { return getStream({c10::DeviceType::CUDA, 0}); }
  void record(void**, const c10::Stream&, const c10::DeviceIndex, const c10::EventFlag) const override {}
  void block(void*, const c10::Stream&) const override {}
  bool queryEvent(void*) const override { return true; }
};
Hooks hooks;
Guard guard;
void* saved_table;
const c10::impl::DeviceGuardImplInterface* saved_guard;
}
extern "C" void pretend(int on) {
  auto* present = const_cast<at::CUDAHooksInterface*>(&at::detail::getCUDAHooks());
  auto& slot = c10::impl::device_guard_impl_registry[static_cast<size_t>(c10::DeviceType::CUDA)];
  if (on) {
    std::memcpy(&saved_table, present, sizeof(void*));
    std::memcpy(present, &hooks, sizeof(void*));
    saved_guard = slot.load();
    slot.store(&guard);
  } else {
    std::memcpy(present, &saved_table, sizeof(void*));
    slot.store(saved_guard);
  }
}
