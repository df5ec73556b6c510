// What is printed: a table, or a JSON object on a line for each shape.
#pragma once

#include <optional>
#include <string>

#include "device.h"
#include "measure.h"

namespace bench {

// What a device can do at most, by its data sheet.
struct Peak {
    std::string name;
    double flops; // dense bf16 products, per second
    double bytes; // of memory, per second
};

// Of a device that is known.
std::optional<Peak> peak_of(const Device &device);

class Report {
  public:
    Report(const Device &device, const Implementation &implementation, std::optional<Peak> peak, const Method &method,
           bool json);
    // What was measured of a shape.
    void result(const Result &result) const;
    // A shape that could not be measured.
    void failure(const Shape &shape, const std::string &why) const;

  private:
    Device device_;
    std::string implementation_;
    std::optional<Peak> peak_;
    Method method_;
    bool json_;
};

// The sets and their shapes.
void print_sets();

} // namespace bench
