// What ends the program, or the measurement of one shape.
#pragma once

#include <stdexcept>
#include <string>

namespace bench {

// Exit statuses.
enum class Status { ok = 0, failed = 1, usage = 2, no_device = 3 };

struct Failure : std::runtime_error {
    Status status;
    explicit Failure(const std::string &what, Status status = Status::failed)
        : std::runtime_error(what), status(status) {}
};

} // namespace bench
