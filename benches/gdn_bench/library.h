// Prefill through the C library, as its users get it: validated, planned, partitioned where that is faster.
#pragma once

#include "prefill.h"

namespace bench {

class Library : public Implementation {
  public:
    // The library at a path, on a device of the runtime that this program has. `segments` of the longest sequence; 0:
    // as it plans.
    Library(const std::string &path, int device, int segments);
    ~Library() override;
    Library(const Library &) = delete;
    std::unique_ptr<Prefill> prefill(const Shape &shape) const override;
    std::string name() const override;

    struct Functions;

  private:
    std::string path_;
    int segments_;
    std::unique_ptr<Functions> functions_;
};

} // namespace bench
