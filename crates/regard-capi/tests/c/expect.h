/* Checks of the C programs in this folder: a failed one prints where and why, and is counted. */
#ifndef EXPECT_H
#define EXPECT_H

#include "regard.h"

#include <stdio.h>
#include <string.h>

/* Checks that failed so far. */
static int failures = 0;

#define EXPECT(condition)                                                                                    \
    do {                                                                                                     \
        if (!(condition)) {                                                                                  \
            printf("%s:%d: not so: %s (last error: %s)\n", __FILE__, __LINE__, #condition, regard_last_error()); \
            failures++;                                                                                      \
        }                                                                                                    \
    } while (0)

/* The call fails with this status, and the words have this in them. */
#define EXPECT_ERROR(call, expected, words)                                                                  \
    do {                                                                                                     \
        regard_status status_ = (call);                                                                      \
        if (status_ != (expected) || strstr(regard_last_error(), (words)) == NULL) {                         \
            printf("%s:%d: %s: status %d, \"%s\"; expected %d, \"...%s...\"\n", __FILE__, __LINE__, #call, (int)status_, \
                   regard_last_error(), (int)(expected), (words));                                           \
            failures++;                                                                                      \
        }                                                                                                    \
    } while (0)

#endif
