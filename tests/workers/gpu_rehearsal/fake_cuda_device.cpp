// A device "cuda" for tensors without data, in PyTorch's build for CPU. It is loaded before PyTorch.
#include <ATen/detail/CUDAHooksInterface.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>

using namespace c10;

static const Device DEVICE(DeviceType::CUDA, 0);
static const Stream STREAM(Stream::DEFAULT, DEVICE);

struct FakeGuard : impl::NoOpDeviceGuardImpl<DeviceType::CUDA> {
  Device exchangeDevice(Device) const override { return DEVICE; }
  Device getDevice() const override { return DEVICE; }
  Stream getStream(Device) const noexcept override { return STREAM; }
  Stream getNewStream(Device, int = 0) const override { return STREAM; }
  Stream exchangeStream(Stream) const noexcept override { return STREAM; }
  void record(void**, const Stream&, const DeviceIndex, const EventFlag) const override {}
  void block(void*, const Stream&) const override {}
  bool queryEvent(void*) const override { return true; }
  void destroyEvent(void*, const DeviceIndex) const noexcept override {}
  bool queryStream(const Stream&) const override { return true; }
  void synchronizeStream(const Stream&) const override {}
  void synchronizeEvent(void*) const override {}
  void recordDataPtrOnStream(const DataPtr&, const Stream&) const override {}
};
static impl::DeviceGuardImplRegistrar registered(DeviceType::CUDA, new FakeGuard());

namespace at {
struct CUDAHooks : CUDAHooksInterface {  // the name is the one that PyTorch looks for
  CUDAHooks(CUDAHooksArgs) {}
  void init() const override {}
  bool isBuilt() const override { return true; }
  bool isAvailable() const override { return true; }
  bool hasCUDA() const override { return true; }
  bool hasPrimaryContext(DeviceIndex) const override { return true; }
  DeviceIndex deviceCount() const override { return 1; }
  DeviceIndex getCurrentDevice() const override { return 0; }
};
REGISTER_CUDA_HOOKS(CUDAHooks)
}  // namespace at
