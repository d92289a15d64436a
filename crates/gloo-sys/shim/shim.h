// Gloo behind C: no C++ type and no exception crosses this interface.
#pragma once

#include <stddef.h>
#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

typedef struct gs_device gs_device;
typedef struct gs_context gs_context;
typedef struct gs_buffer gs_buffer;

enum {
  GS_OK = 0,
  GS_TIMEOUT = 1,
  GS_PEER_LOST = 2,
  GS_IO = 3,
  GS_INVALID = 4,
  GS_ENFORCE = 5,
  GS_STORE = 6,
  GS_SYSTEM = 7,
  GS_OTHER = 8
};

// Filled by whatever returns an error; always ends in a zero.
typedef struct {
  int32_t code;
  char message[1020];
} gs_error;

// Takes bytes from the other side, which keeps no pointer to them: no allocator crosses.
typedef void (*gs_sink)(void* sink, const uint8_t* bytes, size_t len);

// The rendezvous store. Each callback returns zero, or else has put its reason into `why`.
typedef struct {
  void* user;
  int32_t (*set)(void* user, const char* key, size_t key_len, const uint8_t* value,
                 size_t value_len, gs_sink sink, void* why);
  int32_t (*get)(void* user, const char* key, size_t key_len, gs_sink sink, void* value,
                 void* why);
  int32_t (*wait)(void* user, const char* key, size_t key_len, gs_sink sink, void* why);
} gs_store;

// out = a combined with b; `out` may be either of them.
typedef void (*gs_reduce_fn)(void* user, void* out, const void* a, const void* b, size_t len);

typedef struct {
  gs_reduce_fn fn;
  void* user;
  size_t element_size;
} gs_reduction;

// Which gloo error a text means; exposed for its test.
int32_t gs_classify(const char* message);

gs_device* gs_device_tcp(const char* hostname, const char* iface, gs_error*);
void gs_device_free(gs_device*);

gs_context* gs_connect(int rank, int size, const gs_store*, gs_device*, int64_t timeout_ms,
                       gs_error*);
void gs_context_free(gs_context*);
// Closes all connections and wakes whoever waits on them. Safe from any thread.
void gs_context_abort(gs_context*);

int32_t gs_allreduce(gs_context*, void* bytes, size_t elements, const gs_reduction*, uint32_t tag,
                     int64_t timeout_ms, gs_error*);
int32_t gs_reduce(gs_context*, void* bytes, size_t elements, const gs_reduction*, int root,
                  uint32_t tag, int64_t timeout_ms, gs_error*);
int32_t gs_broadcast(gs_context*, void* bytes, size_t len, int root, uint32_t tag,
                     int64_t timeout_ms, gs_error*);
int32_t gs_allgather(gs_context*, const void* in, size_t len, void* out, uint32_t tag,
                     int64_t timeout_ms, gs_error*);
// This rank's piece is in its place in `out`.
int32_t gs_allgatherv(gs_context*, void* out, const size_t* lens, uint32_t tag, int64_t timeout_ms,
                      gs_error*);
int32_t gs_gather(gs_context*, const void* in, size_t len, void* out, int root, uint32_t tag,
                  int64_t timeout_ms, gs_error*);
int32_t gs_scatter(gs_context*, const void* in, void* out, size_t len, int root, uint32_t tag,
                   int64_t timeout_ms, gs_error*);
int32_t gs_alltoallv(gs_context*, const void* in, const int64_t* in_lens, void* out,
                     const int64_t* out_lens, uint32_t tag, int64_t timeout_ms, gs_error*);
int32_t gs_barrier(gs_context*, uint32_t tag, int64_t timeout_ms, gs_error*);

// One message: a buffer is sent or received once.
gs_buffer* gs_buffer_new(gs_context*, void* bytes, size_t len, gs_error*);
void gs_buffer_free(gs_buffer*);
int32_t gs_buffer_send(gs_buffer*, int to, uint64_t slot, gs_error*);
int32_t gs_buffer_recv(gs_buffer*, const int* from, size_t from_len, uint64_t slot, gs_error*);
// `done` is zero after gs_buffer_abort.
int32_t gs_buffer_wait_send(gs_buffer*, int64_t timeout_ms, int32_t* done, gs_error*);
int32_t gs_buffer_wait_recv(gs_buffer*, int64_t timeout_ms, int32_t* from, int32_t* done,
                            gs_error*);
// Wakes whoever waits for the message. Safe from any thread.
void gs_buffer_abort(gs_buffer*);

#ifdef __cplusplus
}
#endif
