// A device for tests: memory that the host cannot touch, and the kernels of the CPU.
//
// Its memory is a file that is mapped twice. Tensors have addresses of the first mapping, which nobody may read, so a host that
// takes a device's address for its own ends with SIGSEGV. Kernels get CPU tensors at the same place of the second mapping.
// An operation whose tensors lie on different devices raises, as on CUDA.

#include <ATen/EmptyTensor.h>
#include <ATen/core/Generator.h>
#include <ATen/detail/PrivateUse1HooksInterface.h>
#include <ATen/ops/empty_strided.h>
#include <c10/core/DeviceGuard.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>
#include <sys/mman.h>
#include <torch/library.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <bit>
#include <cstring>
#include <mutex>
#include <optional>
#include <unordered_map>
#include <vector>

namespace {

using at::Tensor;
using c10::Device;
using c10::DeviceIndex;
using c10::IValue;
using c10::Storage;
using c10::Stream;

constexpr auto kType = c10::DeviceType::PrivateUse1;
constexpr DeviceIndex kDevices = 2;
constexpr size_t kBytes = size_t{8} << 30;
constexpr size_t kSmallestBlock = 64;
constexpr c10::StreamId kMostStreams = 32;

thread_local DeviceIndex current_device = 0;
thread_local c10::StreamId current_stream[kDevices] = {};

Device indexed(Device device) { return device.has_index() ? device : Device(device.type(), current_device); }

// Blocks have sizes of powers of two. New ones hold NaN in every floating type, and -1 in integers.
struct Memory final : c10::Allocator {
  Memory() : owner(getpid()) {
    int file = memfd_create("pretended device", MFD_CLOEXEC);
    TORCH_CHECK(file >= 0 && ftruncate(file, kBytes) == 0, "no memory for the pretended device");
    device = map(file, PROT_NONE);
    host = map(file, PROT_READ | PROT_WRITE);
    close(file);
  }

  static char* map(int file, int rights) {
    void* start = mmap(nullptr, kBytes, rights, MAP_SHARED, file, 0);
    TORCH_CHECK(start != MAP_FAILED, "the pretended device's memory cannot be mapped");
    return static_cast<char*>(start);
  }

  c10::DataPtr allocate(size_t bytes) override;

  void release(void* start) {
    std::lock_guard<std::mutex> lock(mutex);
    size_t block = blocks.at(start);
    blocks.erase(start);
    unused[block].push_back(start);
    allocated -= block;
  }

  char* on_host(const void* start) const {
    return start == nullptr ? nullptr : host + (static_cast<const char*>(start) - device);
  }

  void copy_data(void* target, const void* source, size_t bytes) const override {
    std::memcpy(on_host(target), on_host(source), bytes);
  }

  char *device, *host;
  size_t allocated = 0, peak = 0, used = 0;
  pid_t owner;
  std::mutex mutex;
  std::unordered_map<void*, size_t> blocks;
  std::unordered_map<size_t, std::vector<void*>> unused;
};

Memory& memory() {
  static auto* only = new Memory;  // outlives tensors that are freed as the process ends
  return *only;
}

c10::DataPtr Memory::allocate(size_t bytes) {
  Device place(kType, current_device);
  if (bytes == 0) return {nullptr, place};
  std::lock_guard<std::mutex> lock(mutex);
  TORCH_CHECK(getpid() == owner, "a forked process cannot use the device of its parent");
  size_t block = std::bit_ceil(std::max(bytes, kSmallestBlock));
  auto& free = unused[block];
  if (free.empty()) {
    TORCH_CHECK_WITH(OutOfMemoryError, used + block <= kBytes, "the pretended device is full");
    free.push_back(device + used);
    used += block;
  }
  void* start = free.back();
  free.pop_back();
  blocks[start] = block;
  allocated += block;
  peak = std::max(peak, allocated);
  std::memset(on_host(start), 0xff, block);
  return {start, start, [](void* each) { memory().release(each); }, place};
}

// Pinned memory, and what a kernel allocates for an argument: poisoned too, and where the host may read.
struct HostMemory final : c10::Allocator {
  c10::DataPtr allocate(size_t bytes) override {
    auto* kept = new c10::DataPtr(memory().allocate(bytes));
    auto drop = [](void* each) { delete static_cast<c10::DataPtr*>(each); };
    return {memory().on_host(kept->get()), kept, drop, at::kCPU};
  }
  void copy_data(void* target, const void* source, size_t bytes) const override { std::memcpy(target, source, bytes); }
};

HostMemory host_memory;

// Streams and events do nothing, as every operation has ended when it returns.
struct Guard final : c10::impl::DeviceGuardImplInterface {
  Guard() = default;
  explicit Guard(c10::DeviceType) {}
  c10::DeviceType type() const override { return kType; }
  Device getDevice() const override { return {kType, current_device}; }
  void uncheckedSetDevice(Device device) const noexcept override { current_device = device.index(); }
  void setDevice(Device device) const override {
    TORCH_CHECK(device.index() >= 0 && device.index() < kDevices, "there is no device ", device);
    current_device = device.index();
  }
  Device exchangeDevice(Device device) const override {
    Device old = getDevice();
    setDevice(device);
    return old;
  }
  DeviceIndex deviceCount() const noexcept override { return kDevices; }
  static Stream of(Device device, c10::StreamId id) { return Stream(Stream::UNSAFE, indexed(device), id); }
  Stream getStream(Device device) const override { return of(device, current_stream[indexed(device).index()]); }
  Stream getDefaultStream(Device device) const override { return of(device, 0); }
  Stream getNewStream(Device device, int) const override {
    static std::atomic<c10::StreamId> made{0};
    return of(device, 1 + made++ % kMostStreams);
  }
  Stream getStreamFromGlobalPool(Device device, bool) const override { return getNewStream(device, 0); }
  Stream exchangeStream(Stream stream) const override {
    Stream old = getStream(stream.device());
    current_stream[stream.device_index()] = stream.id();
    return old;
  }
  void record(void** event, const Stream&, const DeviceIndex, const c10::EventFlag) const override {
    static char recorded;
    *event = &recorded;
  }
  void block(void*, const Stream&) const override {}
  bool queryEvent(void*) const override { return true; }
  bool queryStream(const Stream&) const override { return true; }
  void synchronizeStream(const Stream&) const override {}
  void synchronizeEvent(void*) const override {}
  void synchronizeDevice(const DeviceIndex) const override {}
  double elapsedTime(void*, void*, const DeviceIndex) const override { return 0; }
};

struct Hooks final : at::PrivateUse1HooksInterface {
  bool isBuilt() const override { return true; }
  bool isAvailable() const override { return true; }
  bool hasPrimaryContext(DeviceIndex) const override { return true; }
  DeviceIndex deviceCount() const override { return kDevices; }
  c10::Allocator* getPinnedMemoryAllocator() const override { return &host_memory; }
  bool isPinnedPtr(const void* start) const override {
    return start >= memory().host && start < memory().host + kBytes;
  }
  void resizePrivateUse1Bytes(const Storage& storage, size_t bytes) const override {
    c10::DeviceGuard guard(storage.device());
    auto fresh = memory().allocate(bytes);
    memory().copy_data(fresh.get(), storage.data(), std::min(bytes, storage.nbytes()));
    storage.unsafeGetStorageImpl()->set_data_ptr_noswap(std::move(fresh));
    storage.unsafeGetStorageImpl()->set_nbytes(bytes);
  }
};

void check_dtype(c10::ScalarType dtype) {
  TORCH_CHECK_TYPE(dtype != at::kDouble, "the pretended device has no float64, as Ascend's NPU");
}

Tensor empty(at::IntArrayRef sizes, std::optional<at::ScalarType> dtype, std::optional<at::Layout>,
             std::optional<Device> device, std::optional<bool>, std::optional<at::MemoryFormat> format) {
  c10::DeviceGuard guard(*device);
  check_dtype(c10::dtype_or_default(dtype));
  return at::detail::empty_generic(sizes, &memory(), c10::DispatchKeySet(c10::DispatchKey::PrivateUse1),
                                   c10::dtype_or_default(dtype), format);
}

Tensor empty_strided(at::IntArrayRef sizes, at::IntArrayRef strides, std::optional<at::ScalarType> dtype,
                     std::optional<at::Layout>, std::optional<Device> device, std::optional<bool>) {
  c10::DeviceGuard guard(*device);
  check_dtype(c10::dtype_or_default(dtype));
  return at::detail::empty_strided_generic(sizes, strides, &memory(),
                                           c10::DispatchKeySet(c10::DispatchKey::PrivateUse1),
                                           c10::dtype_or_default(dtype));
}

// Without the last two it would be a tensor of inference mode, and Gloo's threads could not write to it.
constexpr c10::DispatchKeySet kOnHost({c10::DispatchKey::CPU, c10::DispatchKey::ADInplaceOrView, c10::DispatchKey::AutogradCPU});

Tensor view(Storage storage, c10::DispatchKeySet keys, const Tensor& like) {
  auto made = at::detail::make_tensor<c10::TensorImpl>(c10::TensorImpl::VIEW, std::move(storage), keys, like.dtype());
  made.unsafeGetTensorImpl()->set_sizes_and_strides(like.sizes(), like.strides(), like.storage_offset());
  return made;
}

// The tensors of one operation, on the device and as the CPU's kernel sees them: the same memory, and no copy.
class Call {
 public:
  Tensor to_host(const Tensor& tensor, bool is_written) {
    if (!tensor.defined()) return tensor;
    if (tensor.is_cpu() && tensor.dim() == 0 && !is_written) return tensor;  // a number
    meet(tensor.device());
    auto host = view(to_host(tensor.storage()), kOnHost, tensor);
    tensors_.push_back({tensor, host});
    return host;
  }

  Storage to_host(const Storage& storage) {
    meet(storage.device());
    for (auto& each : storages_)
      if (each.device.is_alias_of(storage)) return each.host;
    char* start = memory().on_host(storage.data());
    auto drop = [](void* kept) { delete static_cast<Storage*>(kept); };
    c10::DataPtr data(start, new Storage(storage), drop, at::kCPU);
    Storage host(Storage::use_byte_size_t{}, storage.nbytes(), std::move(data), &host_memory, true);
    storages_.push_back({storage, host, start});
    return host;
  }

  // Take over what the kernel did to the shapes and storages of its arguments.
  void update() {
    for (auto& each : storages_) {
      if (each.host.data() == each.start) continue;
      Hooks().resizePrivateUse1Bytes(each.device, each.host.nbytes());
      std::memcpy(memory().on_host(each.device.data()), each.host.data(), each.host.nbytes());
    }
    for (auto& each : tensors_) {
      auto* impl = each.device.unsafeGetTensorImpl();
      if (auto storage = device_storage(each.host); storage && !each.device.storage().is_alias_of(storage))
        impl->set_storage_keep_dtype(storage);
      if (each.device.sizes() != each.host.sizes() || each.device.strides() != each.host.strides() ||
          each.device.storage_offset() != each.host.storage_offset())
        impl->set_sizes_and_strides(each.host.sizes(), each.host.strides(), each.host.storage_offset());
    }
  }

  Tensor to_device(const Tensor& result) {
    if (!result.defined() || !result.is_cpu()) return result;
    for (auto& each : tensors_)
      if (each.host.is_same(result)) return each.device;
    for (auto& each : tensors_)
      if (each.host.is_alias_of(result)) return view(each.device.storage(), each.device.key_set(), result);
    auto made = empty_strided(result.sizes(), result.strides(), result.scalar_type(), {}, *device_, {});
    to_host(made, false).copy_(result);
    return made;
  }

  void meet(Device device) {
    if (device.type() == kType) device = indexed(device);
    if (!device_) device_ = device;
    TORCH_CHECK(*device_ == device && device.type() == kType,
                "Expected all tensors to be on the same device, but found at least two devices, ", *device_, " and ", device, "!");
  }

  std::optional<Device> device_;

 private:
  Storage device_storage(const Tensor& host) {
    for (auto& each : storages_)
      if (each.host.is_alias_of(host.storage())) return each.device;
    return {};
  }

  struct TensorPair { Tensor device, host; };
  struct StoragePair { Storage device, host; const void* start; };
  std::vector<TensorPair> tensors_;
  std::vector<StoragePair> storages_;
};

bool has_tensors(const IValue& value) {
  return value.isTensorList() || value.isOptionalTensorList() ||
         (value.isList() && value.toListRef().size() && has_tensors(value.toListRef()[0]));
}

template <typename Change>
IValue changed(const IValue& value, const Change& change) {
  if (value.isTensor()) return change(value.toTensor());
  if (!has_tensors(value)) return value;
  auto list = value.toList();
  c10::impl::GenericList made(list.elementType());
  for (const IValue& each : list) made.push_back(changed(each, change));
  return made;
}

void compute(const c10::OperatorHandle& op, torch::jit::Stack* stack) {
  Call call;
  const auto& schema = op.schema();
  size_t count = schema.arguments().size(), first = stack->size() - count;
  for (size_t i = 0; i < count; ++i) {
    IValue& value = (*stack)[first + i];
    const auto* alias = schema.arguments()[i].alias_info();
    bool is_written = alias != nullptr && alias->isWrite();
    if (value.isDevice() && value.toDevice().type() == kType) {
      call.meet(value.toDevice());
      value = Device(at::kCPU);
    } else if (value.isStorage()) {
      value = call.to_host(value.toStorage());
    } else if (value.isGenerator() && value.toGenerator().defined()) {
      TORCH_CHECK(false, "Expected a '", Device(kType), "' device type for generator but found '", value.toGenerator().device(), "'");
    } else {
      value = changed(value, [&](const Tensor& each) { return call.to_host(each, is_written); });
    }
  }
  at::AutoDispatchBelowADInplaceOrView below;
  op.redispatchBoxed(c10::DispatchKeySet(c10::DispatchKey::CPU), stack);
  call.update();
  for (size_t i = stack->size() - schema.returns().size(); i < stack->size(); ++i)
    (*stack)[i] = changed((*stack)[i], [&](const Tensor& each) { return call.to_device(each); });
}

void compute_as(const char* name, torch::jit::Stack* stack) {
  compute(c10::Dispatcher::singleton().findSchemaOrThrow(name, ""), stack);
}

// torch gives convolutions of unknown devices other names, and leaves the backward pass one argument out.
void convolve(const c10::OperatorHandle&, torch::jit::Stack* stack) { compute_as("aten::convolution", stack); }

void convolve_back(const c10::OperatorHandle&, torch::jit::Stack* stack) {
  constexpr auto kAfterBias = 7;
  stack->insert(stack->end() - kAfterBias, IValue());
  compute_as("aten::convolution_backward", stack);
}

// The one operation whose tensors may lie on different devices.
Tensor copy_from(const Tensor& source, const Tensor& target, bool) {
  Call from, to;
  auto here = source.is_cpu() ? source : from.to_host(source, false);
  auto there = target.is_cpu() ? target : to.to_host(target, true);
  at::AutoDispatchBelowADInplaceOrView below;
  there.copy_(here);
  return target;
}

void record_stream(Tensor&, Stream) {}

C10_REGISTER_GUARD_IMPL(PrivateUse1, Guard)
REGISTER_ALLOCATOR(kType, &memory())
const bool has_hooks = (at::RegisterPrivateUse1HooksInterface(new Hooks), true);

TORCH_LIBRARY_IMPL(_, PrivateUse1, m) {
  m.fallback(torch::CppFunction::makeFromBoxedFunction<&compute>());
}

TORCH_LIBRARY_IMPL(aten, PrivateUse1, m) {
  m.impl("empty.memory_format", empty);
  m.impl("empty_strided", empty_strided);
  m.impl("_copy_from", copy_from);
  m.impl("record_stream", record_stream);
  m.impl("convolution_overrideable", torch::CppFunction::makeFromBoxedFunction<&convolve>());
  m.impl("convolution_backward_overrideable", torch::CppFunction::makeFromBoxedFunction<&convolve_back>());
}

struct Quiet final : c10::WarningHandler {
  void process(const c10::Warning&) override {}
};

// Gloo does the collectives of this device too. torch has kernels for them, and would warn that they are replaced.
const bool has_collectives = [] {
  Quiet quiet;
  c10::WarningUtils::WarningHandlerGuard guard(&quiet);
  static torch::Library library(torch::Library::IMPL, "c10d", c10::DispatchKey::PrivateUse1, __FILE__, __LINE__);
  for (auto name : {"send", "recv_", "recv_any_source_", "broadcast_", "allreduce_", "allreduce_coalesced_", "allgather_",
                    "_allgather_base_", "allgather_into_tensor_coalesced_", "reduce_scatter_", "_reduce_scatter_base_",
                    "reduce_scatter_tensor_coalesced_", "reduce_", "gather_", "scatter_", "alltoall_", "alltoall_base_", "barrier"})
    library.impl(name, torch::CppFunction::makeFromBoxedFunction<&compute>());
  return true;
}();

}  // namespace

extern "C" {
size_t pretended_bytes() { return memory().allocated; }
size_t pretended_peak() { return memory().peak; }
int pretended_devices() { return kDevices; }
size_t pretended_total() { return kBytes; }
void pretended_reset_peak() { memory().peak = memory().allocated; }
}
