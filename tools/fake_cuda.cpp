// A CUDA device that only fake tensors can lie on, for a PyTorch that was built without CUDA.
//
// PyTorch asks a guard for the current device and stream, and hooks for how many devices there are.
// Both answer here as if there were one device, and do nothing else. The library must be preloaded:
// PyTorch looks for the hooks once, when it is loaded itself.

#include <ATen/detail/CUDAHooksInterface.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>

namespace {

using c10::Device;
using c10::DeviceIndex;
using c10::DeviceType;
using c10::Stream;

struct NoGuard final : c10::impl::DeviceGuardImplInterface {
    DeviceType type() const override { return DeviceType::CUDA; }
    DeviceIndex deviceCount() const noexcept override { return 1; }
    Device getDevice() const override { return Device(DeviceType::CUDA, 0); }
    Device exchangeDevice(Device) const override { return getDevice(); }
    void setDevice(Device) const override {}
    void uncheckedSetDevice(Device) const noexcept override {}

    Stream getStream(Device device) const override { return Stream(Stream::DEFAULT, device); }
    Stream exchangeStream(Stream) const override { return getStream(getDevice()); }
    bool queryStream(const Stream&) const override { return true; }
    void synchronizeStream(const Stream&) const override {}

    void record(void** event, const Stream&, DeviceIndex, c10::EventFlag) const override {
        *event = nullptr;
    }
    void block(void*, const Stream&) const override {}
    bool queryEvent(void*) const override { return true; }
    void destroyEvent(void*, DeviceIndex) const noexcept override {}
};

// PyTorch looks for the hooks by the name of this class.
struct CUDAHooks final : at::CUDAHooksInterface {
    explicit CUDAHooks(at::CUDAHooksArgs) {}
    void init() const override {}
    bool hasCUDA() const override { return true; }
    bool isBuilt() const override { return true; }
    bool isAvailable() const override { return true; }
    DeviceIndex deviceCount() const override { return 1; }
    DeviceIndex getCurrentDevice() const override { return 0; }
    bool hasPrimaryContext(DeviceIndex) const override { return true; }
};

}  // namespace

namespace c10::impl {
C10_REGISTER_GUARD_IMPL(CUDA, NoGuard);
}

namespace at {
using ::CUDAHooks;
REGISTER_CUDA_HOOKS(CUDAHooks);
}  // namespace at
