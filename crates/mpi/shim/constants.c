#include <mpi.h>

// Another number in every implementation, and none that bindgen could take from the header.
void *phalanx_mpi_in_place(void) { return MPI_IN_PLACE; }

// The largest tag, or -1.
int phalanx_mpi_tag_ub(MPI_Comm comm) {
  int *value, found = 0;
  if (MPI_Comm_get_attr(comm, MPI_TAG_UB, &value, &found) != MPI_SUCCESS || !found) return -1;
  return *value;
}
