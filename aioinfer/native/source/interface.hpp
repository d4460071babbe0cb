// What the C functions have in common that aioinfer.native.bindings calls.
//
// Functions that make something return null when they fail, others false; ``aioinfer_error`` says why, to the thread
// that called. Sizes are counted in elements. Pointers that are handed over stay valid for as long as they are used.
#pragma once

#include <exception>
#include <string>

namespace aioinfer {

// What went wrong last on this thread.
std::string& last_error();

// What call() returns, or ``failed`` if it throws.
template <class Result, class Call>
Result guarded(Result failed, Call&& call) {
  try {
    return call();
  } catch (const std::exception& problem) {
    last_error() = problem.what();
    return failed;
  }
}

}  // namespace aioinfer
