#include "report.h"

#include <algorithm>
#include <cmath>
#include <cstdio>
#include <cstdlib>

namespace bench {
namespace {

std::string number(const char *format, double value) {
    char text[64];
    std::snprintf(text, sizeof text, format, value);
    return text;
}

// A cell of a line and the space after it; to the left in a negative width.
std::string padded(const std::string &text, int width) {
    const std::string space(std::max(0, std::abs(width) - static_cast<int>(text.size())), ' ');
    return (width < 0 ? text + space : space + text) + " ";
}

std::string quoted(const std::string &text) {
    std::string out = "\"";
    for (const char c : text) {
        if (c == '"' || c == '\\')
            out += '\\';
        // Messages of the runtime have line breaks at most.
        out += static_cast<unsigned char>(c) < 0x20 ? ' ' : c;
    }
    return out + "\"";
}

// The fields of an object.
class Fields {
  public:
    Fields &text(const char *name, const std::string &value) { return raw(name, quoted(value)); }
    // JSON has no NaN.
    Fields &value(const char *name, double value) {
        return raw(name, std::isfinite(value) ? number("%.9g", value) : "null");
    }
    Fields &raw(const char *name, const std::string &value) {
        text_ += (text_.empty() ? "{" : ", ") + quoted(name) + ": " + value;
        return *this;
    }
    std::string end() const { return text_ + "}"; }

  private:
    std::string text_;
};

std::string times(const std::optional<Times> &t) {
    if (!t)
        return "null";
    return Fields().value("median_us", t->median).value("fastest_us", t->fastest).value("slowest_us", t->slowest).end();
}

void print(const std::string &line) {
    std::printf("%s\n", line.c_str());
    std::fflush(stdout); // a sweep takes long, and what reads it wants each line
}

} // namespace

std::optional<Peak> peak_of(const Device &device) {
    const auto is = [&](const char *text) { return device.name.find(text) != std::string::npos; };
    if (device.simulated)
        return std::nullopt;
    if (device.arch == "gfx942" && device.compute_units == 304)
        return is("MI325") ? Peak{"MI325X", 1307e12, 6.0e12} : Peak{"MI300X", 1307e12, 5.3e12};
    if (device.arch == "gfx942" && device.compute_units == 228)
        return Peak{"MI300A", 981e12, 5.3e12};
    if (device.arch == "gfx942" && device.compute_units == 80)
        return Peak{"MI308X", 232e12, 5.3e12};
    if (is("H200"))
        return Peak{"H200", 989e12, 4.8e12};
    if (is("H100 80GB HBM3"))
        return Peak{"H100 SXM", 989e12, 3.35e12};
    return std::nullopt;
}

Report::Report(const Device &device, const Implementation &implementation, std::optional<Peak> peak,
               const Method &method, bool json)
    : device_(device), implementation_(implementation.name()), peak_(device.simulated ? std::nullopt : peak),
      method_(method), json_(json) {
    if (json_)
        return;
    print(device.name + ", " + device.arch + ", " + std::to_string(device.compute_units) +
          " compute units; through: " + implementation_);
    if (device.simulated)
        print("SIMULATED: times are wall time of this host's CPU, not of a GPU; nothing is derived from them");
    else if (peak_)
        print("roofline of " + peak_->name + ": " + number("%.0f TFLOP/s, ", peak_->flops / 1e12) +
              number("%.2f TB/s", peak_->bytes / 1e12));
    else
        print("peaks of this device are not known: no roofline; --roofline TFLOPS,TBPS gives them");
    char line[160];
    std::snprintf(line, sizeof line, "%-5s %-28s %12s %12s %12s %9s %9s %9s %9s %9s", "set", "HK,HV,lengths",
                  device.simulated ? "host us" : "median us", "prepare us", "scan us", "TFLOP/s", "GB/s", "roofline",
                  "error o", "error S");
    print(line);
}

void Report::result(const Result &r) const {
    const bool derived = r.whole && !device_.simulated;
    const double seconds = derived ? r.whole->median * 1e-6 : 0;
    const double bound = peak_ ? std::max(r.bound.flops / peak_->flops, r.bound.bytes / peak_->bytes) : 0;
    const bool passed = r.deviation.objection.empty();
    if (json_) {
        const auto derive = [&](bool known, double value) { return known ? number("%.6g", value) : "null"; };
        std::string lengths;
        for (const int64_t n : r.shape.lengths)
            lengths += (lengths.empty() ? "[" : ", ") + std::to_string(n);
        print(Fields()
                  .text("set", r.shape.set)
                  .text("shape", r.shape.name())
                  .value("key_heads", r.shape.key_heads)
                  .value("value_heads", r.shape.value_heads)
                  .value("key_dim", r.shape.key_dim)
                  .value("value_dim", r.shape.value_dim)
                  .raw("lengths", lengths + "]")
                  .text("device", device_.name)
                  .text("arch", device_.arch)
                  .text("through", implementation_)
                  .text("clock", device_.simulated ? "simulated: wall time of the host" : "HIP events")
                  .raw("passed", passed ? "true" : "false")
                  .raw("objection", passed ? "null" : quoted(r.deviation.objection))
                  .value("error_o", r.deviation.outputs)
                  .value("error_state", r.deviation.states)
                  .value("runs", method_.runs)
                  .value("copies", r.copies)
                  .raw("prefill", times(r.whole))
                  .raw("prefill_prepare", times(r.prepare))
                  .raw("prefill_scan", times(r.scan))
                  .value("flops", r.bound.flops)
                  .value("bytes", r.bound.bytes)
                  .raw("tflops_per_s", derive(derived, r.bound.flops / seconds / 1e12))
                  .raw("gbytes_per_s", derive(derived, r.bound.bytes / seconds / 1e9))
                  .raw("roofline_us", derive(peak_.has_value(), bound * 1e6))
                  .raw("roofline_fraction", derive(derived && peak_, bound / seconds))
                  .end());
        return;
    }
    const auto us = [](const std::optional<Times> &t) { return t ? number("%.1f", t->median) : "-"; };
    const auto cell = [&](bool known, const char *format, double value) { return known ? number(format, value) : "-"; };
    std::string name = r.shape.name();
    if (r.shape.key_dim != 128 || r.shape.value_dim != 128)
        name += " (" + std::to_string(r.shape.key_dim) + " by " + std::to_string(r.shape.value_dim) + ")";
    std::string line = padded(r.shape.set, -5) + padded(name, -28);
    for (const std::optional<Times> &t : {r.whole, r.prepare, r.scan})
        line += padded(us(t), 12);
    line += padded(cell(derived, "%.1f", r.bound.flops / seconds / 1e12), 9);
    line += padded(cell(derived, "%.0f", r.bound.bytes / seconds / 1e9), 9);
    line += padded(cell(derived && peak_, "%.1f%%", 100 * bound / seconds), 9);
    line += padded(number("%.2e", r.deviation.outputs), 9) + number("%9.2e", r.deviation.states);
    print(line + (passed ? "" : "\n      WRONG, not timed: " + r.deviation.objection));
}

void Report::failure(const Shape &shape, const std::string &why) const {
    if (json_)
        print(Fields().text("set", shape.set).text("shape", shape.name()).text("failure", why).end());
    else
        print(shape.set + " " + shape.name() + ": not measured: " + why);
}

void print_sets() {
    for (const Set &set : sets()) {
        const std::vector<Shape> shapes = set.shapes();
        print(std::string(set.name) + ": " + std::to_string(shapes.size()) + " shapes; " + set.what);
        for (const Shape &s : shapes) {
            const std::string dims = " (" + std::to_string(s.key_dim) + " by " + std::to_string(s.value_dim) + ")";
            print("    " + s.name() + (s.key_dim == 128 && s.value_dim == 128 ? "" : dims));
        }
    }
}

} // namespace bench
