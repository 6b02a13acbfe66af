// pack_gguf_weight and packed_embedding.
#include "csrc/runtime/gguf_blocks.h"

#include <algorithm>
#include <vector>

#include "csrc/engine/linear.h"
#include "csrc/torch/checks.h"
#include "csrc/torch/huge_tensor.h"
#include "csrc/torch/torch_headers.h"

namespace tle {

namespace {

// An index [n] into 0 .. n - 1; undefined where there is none.
at::Tensor checked_order(const char* op, const char* name, const std::optional<at::Tensor>& order, int64_t n) {
  if (!order.has_value()) return {};
  check_dtype(op, name, *order, at::kLong);
  check_dim(op, name, *order, 1);
  check_size(op, name, *order, 0, n, "as many as the blocks have");
  const at::Tensor dense = order->contiguous();
  for (int64_t i = 0; i < n; ++i) {
    const int64_t index = dense.const_data_ptr<int64_t>()[i];
    TORCH_CHECK_INDEX(index >= 0 && index < n, op, ": ", name, "[", i, "] is ", index, ", and there are ", n);
  }
  return dense;
}

at::Tensor pack_gguf_weight(const at::Tensor& blocks, c10::string_view type_name, int64_t in_features,
                            const std::optional<at::Tensor>& rows, const std::optional<at::Tensor>& groups) {
  const char* op = "pack_gguf_weight";
  check_dtype(op, "blocks", blocks, at::kByte);
  check_dim(op, "blocks", blocks, 2);
  const GgufType& type = gguf_type(std::string(type_name));
  const int64_t n = blocks.size(0);
  const PackedHeader header = gguf_header(type, n, in_features);
  check_size(op, "blocks", blocks, 1, in_features / type.block_k * type.block_bytes, "the blocks of a row");
  TORCH_CHECK_VALUE(blocks.stride(1) == 1 || blocks.size(1) <= 1, op, ": the rows of blocks must be dense");
  const at::Tensor order = checked_order(op, "rows", rows, n);
  std::vector<int64_t> place;  // of each group of a row
  if (groups.has_value()) {
    const at::Tensor from = checked_order(op, "groups", groups, in_features / kGgufGroup);
    place.assign(size_t(from.numel()), -1);
    for (int64_t g = 0; g < from.numel(); ++g) place[size_t(from.const_data_ptr<int64_t>()[g])] = g;
    TORCH_CHECK_VALUE(std::find(place.begin(), place.end(), -1) == place.end(), op, ": groups must be a permutation");
  }
  const PackedLayout layout = layout_of(header);
  at::Tensor packed = empty_huge({layout.total_bytes}, blocks.options(), Arena::kWeights);
  memcpy(packed.mutable_data_ptr(), &header, sizeof header);

  struct Stage {
    const GgufType* type;
    PackedHeader header;
    uint8_t* packed;
    const uint8_t* blocks;
    int64_t stride;
    const int64_t *order, *place;
  };
  Program program(1);
  program.add(
      Stage{&type, header, packed.mutable_data_ptr<uint8_t>(), blocks.const_data_ptr<uint8_t>(), blocks.stride(0),
            rows.has_value() ? order.const_data_ptr<int64_t>() : nullptr, groups.has_value() ? place.data() : nullptr},
      layout.panels, layout.total_bytes, +[](const Stage& s, int64_t panel, int) {
        const uint8_t* of_channel[16] = {};
        const int64_t first = panel * kPanelChannels;
        for (int64_t c = 0; c < std::min(kPanelChannels, s.header.n - first); ++c)
          of_channel[c] = s.blocks + (s.order ? s.order[first + c] : first + c) * s.stride;
        pack_gguf_panel(*s.type, s.header, s.packed, panel, of_channel, s.place);
      });
  program.run();
  return packed;
}

at::Tensor packed_embedding(const at::Tensor& ids, const at::Tensor& packed, int64_t out_features, int64_t in_features,
                            at::ScalarType dtype) {
  const char* op = "packed_embedding";
  check_dtype(op, "ids", ids, at::kLong);
  check_dtype(op, "packed", packed, at::kByte);
  check_dim(op, "packed", packed, 1);
  const at::Tensor bytes = packed.contiguous(), index = ids.contiguous();
  const PackedHeader header = read_header(bytes.const_data_ptr(), bytes.numel());
  TORCH_CHECK_VALUE(header.n == out_features && header.k == in_features, op, ": packed holds [", header.n, ", ",
                    header.k, "], expected [", out_features, ", ", in_features, "]");
  auto shape = ids.sizes().vec();
  shape.push_back(in_features);
  at::Tensor out = at::empty(shape, ids.options().dtype(dtype));
  const DType type = float_dtype(op, "dtype", out);
  for (int64_t i = 0; i < index.numel(); ++i) {
    const int64_t id = index.const_data_ptr<int64_t>()[i];
    TORCH_CHECK_INDEX(id >= 0 && id < header.n, op, ": id ", id, " is not in 0 .. ", header.n - 1);
  }

  struct Stage {
    LinearWeight table;
    const int64_t* ids;
    void* out;
    DType dtype;
    float* values;  // [members][k]
  };
  Program program(1);
  Stage stage = {{}, index.const_data_ptr<int64_t>(), out.mutable_data_ptr(), type,
                 program.scratch<float>(program.members() * in_features)};
  stage.table.data = bytes.const_data_ptr();
  stage.table.packed = true;
  stage.table.header = header;
  stage.table.k = in_features;
  program.add(stage, index.numel(), out.numel() * 8, +[](const Stage& s, int64_t i, int member) {
    const int64_t k = s.table.k;
    s.table.row(s.ids[i], s.dtype, static_cast<char*>(s.out) + i * k * dtype_size(s.dtype), s.values + member * k);
  });
  program.run();
  return out;
}

}  // namespace

TORCH_LIBRARY_IMPL(tle, CPU, m) {
  m.impl("pack_gguf_weight", pack_gguf_weight);
  m.impl("packed_embedding", packed_embedding);
}

}  // namespace tle
