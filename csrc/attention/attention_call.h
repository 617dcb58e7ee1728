// Attention of packed sequences in fp32, as csrc/layers/encoder.cpp calls it: defined in attention.cpp. Included
// once a level.

namespace fastplm::FASTPLM_LEVEL {

struct PackedAttention {
  // Rows of H heads side by side, [N, H D]: the queries query_row apart, keys and values key_row.
  const float *query, *key, *value;
  int64_t query_row, key_row;
  float* out;  // [queries, H D], rows out_row apart
  int64_t out_row;
  const int32_t *starts_q, *starts_k;  // [batch + 1], sequence b is rows starts[b] to starts[b + 1]
  int64_t batch, heads, dim;
  float scale;
};

void attend(const PackedAttention& args);

}  // namespace fastplm::FASTPLM_LEVEL
