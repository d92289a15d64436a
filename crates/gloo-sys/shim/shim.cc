#include "shim.h"

// gloo/common/error.h uses std::runtime_error without including it.
#include <stdexcept>

#include <algorithm>
#include <chrono>
#include <cstring>
#include <memory>
#include <string>
#include <system_error>
#include <type_traits>
#include <vector>

#include <gloo/allgather.h>
#include <gloo/allgatherv.h>
#include <gloo/allreduce.h>
#include <gloo/alltoallv.h>
#include <gloo/barrier.h>
#include <gloo/broadcast.h>
#include <gloo/config.h>
#include <gloo/gather.h>
#include <gloo/reduce.h>
#include <gloo/rendezvous/context.h>
#include <gloo/rendezvous/store.h>
#include <gloo/scatter.h>
#include <gloo/transport/tcp/device.h>

using gloo::transport::UnboundBuffer;
using std::chrono::milliseconds;

struct gs_device {
  std::shared_ptr<gloo::transport::Device> device;
};

struct gs_context {
  std::shared_ptr<gloo::rendezvous::Context> context;
};

struct gs_buffer {
  // Outlives the buffer, which points into it.
  std::shared_ptr<gloo::rendezvous::Context> context;
  std::unique_ptr<UnboundBuffer> buffer;
};

namespace {

struct StoreError : std::runtime_error {
  using std::runtime_error::runtime_error;
};

void put(gs_error* error, int32_t code, const char* message) {
  if (!error) return;
  error->code = code;
  std::strncpy(error->message, message ? message : "", sizeof error->message - 1);
  error->message[sizeof error->message - 1] = 0;
}

// Gloo throws one class for timeouts and lost peers; only the text tells them apart.
int32_t classify(const std::string& message) {
  auto has = [&](const char* text) { return message.find(text) != std::string::npos; };
  // Another operation of this process was late, for which gloo closes what all of them need.
  if (has("Application timeout")) return GS_IO;
  if (has("Timed out") || has("timed out") || has("timeout")) return GS_TIMEOUT;
  if (has("closed by peer") || has("Connection reset") || has("Broken pipe") ||
      has("Connection refused") || has("Socket closed"))
    return GS_PEER_LOST;
  return GS_IO;
}

template <class Body>
int32_t guard(gs_error* error, Body&& body) noexcept {
  int32_t code = GS_OTHER;
  try {
    put(error, GS_OK, "");
    body();
    return GS_OK;
  } catch (const StoreError& what) {
    put(error, code = GS_STORE, what.what());
  } catch (const gloo::IoException& what) {
    put(error, code = classify(what.what()), what.what());
  } catch (const gloo::InvalidOperationException& what) {
    put(error, code = GS_INVALID, what.what());
  } catch (const gloo::EnforceNotMet& what) {
    put(error, code = GS_ENFORCE, what.what());
  } catch (const std::system_error& what) {
    put(error, code = GS_SYSTEM, what.what());
  } catch (const std::exception& what) {
    put(error, code = GS_OTHER, what.what());
  } catch (...) {
    put(error, code = GS_OTHER, "an exception of an unknown type");
  }
  return code;
}

void into_string(void* sink, const uint8_t* bytes, size_t len) {
  try {
    static_cast<std::string*>(sink)->assign(reinterpret_cast<const char*>(bytes), len);
  } catch (...) {
    // Out of memory: the text stays empty.
  }
}

class CallbackStore : public gloo::rendezvous::Store {
 public:
  explicit CallbackStore(const gs_store& store) : store_(store) {}

  void set(const std::string& key, const std::vector<char>& value) override {
    std::string why;
    auto bytes = reinterpret_cast<const uint8_t*>(value.data());
    if (store_.set(store_.user, key.data(), key.size(), bytes, value.size(), into_string, &why))
      throw StoreError(why);
  }

  std::vector<char> get(const std::string& key) override {
    std::string value, why;
    if (store_.get(store_.user, key.data(), key.size(), into_string, &value, &why))
      throw StoreError(why);
    return std::vector<char>(value.begin(), value.end());
  }

  void wait(const std::vector<std::string>& keys) override {
    for (auto& key : keys) {
      std::string why;
      if (store_.wait(store_.user, key.data(), key.size(), into_string, &why))
        throw StoreError(why);
    }
  }

  // How long is for the callback to say.
  void wait(const std::vector<std::string>& keys, const milliseconds&) override { wait(keys); }

 private:
  gs_store store_;
};

using Device = std::shared_ptr<gloo::transport::Device>;
using StorePointer = std::shared_ptr<gloo::rendezvous::Store>;

// Gloo takes a reference to a store until 2025 and a pointer since: what the headers offer is used.
template <class Context>
auto connect_full_mesh(Context& context, StorePointer& store, Device& device, int)
    -> decltype(context.connectFullMesh(*store, device)) {
  return context.connectFullMesh(*store, device);
}

template <class Context>
auto connect_full_mesh(Context& context, StorePointer& store, Device& device, long)
    -> decltype(context.connectFullMesh(store, device)) {
  return context.connectFullMesh(store, device);
}

// Gloo looks at nothing but the size of an element.
template <class Body>
void with_element(size_t size, Body&& body) {
  switch (size) {
    case 1: return body(static_cast<uint8_t*>(nullptr));
    case 2: return body(static_cast<uint16_t*>(nullptr));
    case 4: return body(static_cast<uint32_t*>(nullptr));
    case 8: return body(static_cast<uint64_t*>(nullptr));
  }
  throw std::invalid_argument("an element has 1, 2, 4 or 8 bytes");
}

template <class Options>
void prepare(Options& options, uint32_t tag, int64_t timeout_ms) {
  options.setTag(tag);
  options.setTimeout(milliseconds(timeout_ms));
}

uint8_t* mutable_bytes(const void* bytes) {
  return static_cast<uint8_t*>(const_cast<void*>(bytes));
}

template <class Options, class Run>
int32_t reduce_with(Options& options, void* bytes, size_t elements, const gs_reduction* reduction,
                    Run&& run) {
  gs_reduction with = *reduction;
  with_element(with.element_size, [&](auto element) {
    using Element = std::remove_pointer_t<decltype(element)>;
    options.setOutput(static_cast<Element*>(bytes), elements);
    options.setReduceFunction([with](void* out, const void* a, const void* b, size_t len) {
      with.fn(with.user, out, a, b, len);
    });
    run(options);
  });
  return GS_OK;
}

}  // namespace

extern "C" {

int32_t gs_classify(const char* message) { return classify(message); }

gs_device* gs_device_tcp(const char* hostname, const char* iface, gs_error* error) {
  gs_device* device = nullptr;
  guard(error, [&] {
    gloo::transport::tcp::attr attributes;
    if (hostname) attributes.hostname = hostname;
    if (iface) attributes.iface = iface;
    device = new gs_device{gloo::transport::tcp::CreateDevice(attributes)};
  });
  return device;
}

void gs_device_free(gs_device* device) {
  guard(nullptr, [&] { delete device; });
}

gs_context* gs_connect(int rank, int size, const gs_store* store, gs_device* device,
                       int64_t timeout_ms, gs_error* error) {
  gs_context* connected = nullptr;
  guard(error, [&] {
    auto context = std::make_shared<gloo::rendezvous::Context>(rank, size);
    // A connection is waited for five times as long as said; every operation says its own limit.
    context->setTimeout(milliseconds(std::max<int64_t>(timeout_ms / 5, 1)));
    StorePointer callbacks = std::make_shared<CallbackStore>(*store);
    connect_full_mesh(*context, callbacks, device->device, 0);
    connected = new gs_context{std::move(context)};
  });
  return connected;
}

void gs_context_free(gs_context* context) {
  guard(nullptr, [&] { delete context; });
}

void gs_context_abort(gs_context* context) {
  // Closing the connections does not wake a blocked operation; a wait that runs out of time ends
  // all of the context. The slot is one that nobody uses.
  constexpr uint64_t kNobodysSlot = UINT64_C(0x7f) << 56;
  for (int peer = 0; peer < context->context->size; peer++) {
    if (peer == context->context->rank) continue;
    // A connection that is closed already has nothing to wait on; then another one does it.
    bool begun = false;
    guard(nullptr, [&] {
      uint8_t byte;
      auto buffer = context->context->createUnboundBuffer(&byte, 1);
      buffer->recv(peer, kNobodysSlot);
      begun = true;
      buffer->waitRecv(milliseconds(1));
    });
    if (begun) return;
  }
}

int32_t gs_allreduce(gs_context* context, void* bytes, size_t elements,
                     const gs_reduction* reduction, uint32_t tag, int64_t timeout_ms,
                     gs_error* error) {
  return guard(error, [&] {
    gloo::AllreduceOptions options(context->context);
    prepare(options, tag, timeout_ms);
    reduce_with(options, bytes, elements, reduction, [](auto& ready) { gloo::allreduce(ready); });
  });
}

int32_t gs_reduce(gs_context* context, void* bytes, size_t elements, const gs_reduction* reduction,
                  int root, uint32_t tag, int64_t timeout_ms, gs_error* error) {
  return guard(error, [&] {
    gloo::ReduceOptions options(context->context);
    prepare(options, tag, timeout_ms);
    options.setRoot(root);
    reduce_with(options, bytes, elements, reduction, [](auto& ready) { gloo::reduce(ready); });
  });
}

int32_t gs_broadcast(gs_context* context, void* bytes, size_t len, int root, uint32_t tag,
                     int64_t timeout_ms, gs_error* error) {
  return guard(error, [&] {
    gloo::BroadcastOptions options(context->context);
    prepare(options, tag, timeout_ms);
    options.setRoot(root);
    options.setOutput(mutable_bytes(bytes), len);
    gloo::broadcast(options);
  });
}

int32_t gs_allgather(gs_context* context, const void* in, size_t len, void* out, uint32_t tag,
                     int64_t timeout_ms, gs_error* error) {
  return guard(error, [&] {
    gloo::AllgatherOptions options(context->context);
    prepare(options, tag, timeout_ms);
    options.setInput(mutable_bytes(in), len);
    options.setOutput(mutable_bytes(out), len * context->context->size);
    gloo::allgather(options);
  });
}

int32_t gs_allgatherv(gs_context* context, void* out, const size_t* lens, uint32_t tag,
                      int64_t timeout_ms, gs_error* error) {
  return guard(error, [&] {
    gloo::AllgathervOptions options(context->context);
    prepare(options, tag, timeout_ms);
    std::vector<size_t> counts(lens, lens + context->context->size);
    options.setOutput(mutable_bytes(out), counts);
    gloo::allgatherv(options);
  });
}

int32_t gs_gather(gs_context* context, const void* in, size_t len, void* out, int root,
                  uint32_t tag, int64_t timeout_ms, gs_error* error) {
  return guard(error, [&] {
    gloo::GatherOptions options(context->context);
    prepare(options, tag, timeout_ms);
    options.setRoot(root);
    options.setInput(mutable_bytes(in), len);
    if (context->context->rank == root)
      options.setOutput(mutable_bytes(out), len * context->context->size);
    gloo::gather(options);
  });
}

int32_t gs_scatter(gs_context* context, const void* in, void* out, size_t len, int root,
                   uint32_t tag, int64_t timeout_ms, gs_error* error) {
  return guard(error, [&] {
    gloo::ScatterOptions options(context->context);
    prepare(options, tag, timeout_ms);
    options.setRoot(root);
    if (context->context->rank == root) {
      std::vector<uint8_t*> parts;
      for (int rank = 0; rank < context->context->size; rank++)
        parts.push_back(mutable_bytes(in) + len * rank);
      options.setInputs(parts, len);
    }
    options.setOutput(mutable_bytes(out), len);
    gloo::scatter(options);
  });
}

int32_t gs_alltoallv(gs_context* context, const void* in, const int64_t* in_lens, void* out,
                     const int64_t* out_lens, uint32_t tag, int64_t timeout_ms, gs_error* error) {
  return guard(error, [&] {
    gloo::AlltoallvOptions options(context->context);
    prepare(options, tag, timeout_ms);
    const int size = context->context->size;
    options.setInput(mutable_bytes(in), std::vector<int64_t>(in_lens, in_lens + size));
    options.setOutput(mutable_bytes(out), std::vector<int64_t>(out_lens, out_lens + size));
    gloo::alltoallv(options);
  });
}

int32_t gs_barrier(gs_context* context, uint32_t tag, int64_t timeout_ms, gs_error* error) {
  return guard(error, [&] {
    gloo::BarrierOptions options(context->context);
    prepare(options, tag, timeout_ms);
    gloo::barrier(options);
  });
}

gs_buffer* gs_buffer_new(gs_context* context, void* bytes, size_t len, gs_error* error) {
  gs_buffer* made = nullptr;
  guard(error, [&] {
    auto buffer = context->context->createUnboundBuffer(bytes, len);
    made = new gs_buffer{context->context, std::move(buffer)};
  });
  return made;
}

void gs_buffer_free(gs_buffer* buffer) {
  guard(nullptr, [&] { delete buffer; });
}

int32_t gs_buffer_send(gs_buffer* buffer, int to, uint64_t slot, gs_error* error) {
  return guard(error, [&] { buffer->buffer->send(to, slot); });
}

int32_t gs_buffer_recv(gs_buffer* buffer, const int* from, size_t from_len, uint64_t slot,
                       gs_error* error) {
  return guard(error, [&] {
    if (from_len == 1) return buffer->buffer->recv(*from, slot);
    // All of the buffer is the default, but not of one that is empty.
    auto len = buffer->buffer->size;
    buffer->buffer->recv(std::vector<int>(from, from + from_len), slot, 0, len);
  });
}

int32_t gs_buffer_wait_send(gs_buffer* buffer, int64_t timeout_ms, int32_t* done,
                            gs_error* error) {
  return guard(error, [&] { *done = buffer->buffer->waitSend(milliseconds(timeout_ms)); });
}

int32_t gs_buffer_wait_recv(gs_buffer* buffer, int64_t timeout_ms, int32_t* from, int32_t* done,
                            gs_error* error) {
  return guard(error, [&] {
    int source = -1;
    *done = buffer->buffer->waitRecv(&source, milliseconds(timeout_ms));
    *from = source;
  });
}

void gs_buffer_abort(gs_buffer* buffer) {
  guard(nullptr, [&] {
    buffer->buffer->abortWaitSend();
    buffer->buffer->abortWaitRecv();
  });
}

}  // extern "C"
