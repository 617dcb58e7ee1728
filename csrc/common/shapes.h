// The shapes of an operator's tensors. Each is said once, by its name and sizes; a letter is one size in all of them:
//
//   Shapes shapes;
//   shapes.rows(input, "input [..., E]");        // its rows are contiguous
//   shapes.dense(out, "out [..., E]");           // of the same sizes, in row-major order
//   shapes.any(cu_seqlens, "cu_seqlens [B + 1]");  // of any strides
//   shapes['B']
//
// The text is read when csrc/ is compiled, so that a check takes nanoseconds. A tensor that does not fit is an error
// that names the operator (operators.h), as is one on another device than the first or without memory.
#pragma once

#include <array>
#include <initializer_list>
#include <string>

#include "common/tensors.h"

namespace fastplm {

struct Shape {
  consteval Shape(const char* text) : text(text) {
    while (*text != '[') ++text;
    for (++text; *text != ']';) {
      if (*text == ' ' || *text == ',') {
        ++text;
      } else if (*text == '.') {
        leads = true;
        ++text;
      } else if (*text >= 'A' && *text <= 'Z') {
        sizes[count++] = {*text++, 0};
      } else if (*text == '+') {
        sizes[count - 1].number = text[2] - '0';
        text += 3;
      } else {
        int number = 0;
        for (; *text >= '0' && *text <= '9'; ++text) number = 10 * number + *text - '0';
        sizes[count++] = {0, number};
      }
    }
  }

  // A size that is the letter's, plus a number; without a letter it is the number.
  struct Size {
    char letter;
    int number;
  };
  const char* text;
  bool leads = false;  // any number of sizes come before the others
  size_t count = 0;
  std::array<Size, 5> sizes{};
};

class Shapes {
 public:
  Shapes() { sizes_.fill(-1); }

  // The size that a letter stands for.
  int64_t operator[](char letter) const { return sizes_[letter - 'A']; }

  void any(const Tensor& tensor, const Shape& shape) {
    const auto sizes = tensor.sizes();
    if (!fits(sizes, shape) || !is_here(tensor)) refuse(tensor, shape, "");
  }
  void rows(const Tensor& tensor, const Shape& shape) {
    any(tensor, shape);
    const int64_t dims = tensor.dim();
    if (dims > 0 && tensor.size(dims - 1) > 1 && tensor.stride(dims - 1) != 1) refuse(tensor, shape, " of contiguous rows");
  }
  void dense(const Tensor& tensor, const Shape& shape) {
    any(tensor, shape);
    if (!tensor.is_contiguous()) refuse(tensor, shape, " in row-major order");
  }
  // Dense, or without elements: a result that nobody wants.
  void wanted(const Tensor& tensor, const Shape& shape) {
    if (tensor.numel() > 0) dense(tensor, shape);
  }

  void any(const std::optional<Tensor>& tensor, const Shape& shape) {
    if (tensor) any(*tensor, shape);
  }
  void rows(const std::optional<Tensor>& tensor, const Shape& shape) {
    if (tensor) rows(*tensor, shape);
  }
  void dense(const std::optional<Tensor>& tensor, const Shape& shape) {
    if (tensor) dense(*tensor, shape);
  }
  template <typename T>
  void any(const Dense<T>& given, const Shape& shape) {
    any(given.tensor, shape);
  }

 private:
  bool fits(torch::headeronly::IntHeaderOnlyArrayRef sizes, const Shape& shape) {
    if (sizes.size() < shape.count) return false;
    const auto leading = static_cast<int64_t>(sizes.size() - shape.count);
    if (!shape.leads) {
      if (leading > 0) return false;
    } else if (leading_count_ < 0) {
      leading_ = sizes.data();
      leading_count_ = leading;
    } else if (leading != leading_count_ || !std::equal(leading_, leading_ + leading, sizes.data())) {
      return false;
    }
    for (size_t i = 0; i < shape.count; ++i) {
      const auto [letter, number] = shape.sizes[i];
      const int64_t size = sizes[leading + i] - number;
      if (letter == 0) {
        if (size != 0) return false;
        continue;
      }
      int64_t& known = sizes_[letter - 'A'];
      if (known < 0) known = size;
      if (size < 0 || size != known) return false;
    }
    return true;
  }

  bool is_here(const Tensor& tensor) {
    int32_t device = -1;
    aoti_torch_get_device_type(tensor.get(), &device);
    if (device_ < 0) device_ = device;
    return device == device_ && (tensor.const_data_ptr() != nullptr || tensor.numel() == 0);
  }

  [[noreturn]] void refuse(const Tensor& tensor, const Shape& shape, const char* layout) const {
    std::string text = std::string(shape.text) + layout + " does not fit: its shape is [";
    for (int64_t i = 0; i < tensor.dim(); ++i) text += (i == 0 ? "" : ", ") + std::to_string(tensor.size(i));
    text += "]";
    for (char letter = 'A'; letter <= 'Z'; ++letter) {
      if ((*this)[letter] >= 0) text += std::string(", ") + letter + " is " + std::to_string((*this)[letter]);
    }
    throw WrongArgument(text);
  }

  std::array<int64_t, 26> sizes_;         // -1: not known yet
  const int64_t* leading_ = nullptr;      // what "..." stands for
  int64_t leading_count_ = -1;
  int32_t device_ = -1;
};

// What else must hold of an operator's arguments.
inline void require(bool fits, const char* expected) {
  if (!fits) throw WrongArgument(expected);
}

}  // namespace fastplm
